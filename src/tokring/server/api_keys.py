"""ApiKeys: the keys that open the API, compared in constant time."""

import hashlib
import hmac
import logging
import os
import stat

from tokring.config import ServerSettings

logger = logging.getLogger(__name__)


class ApiKeys:
    """--api-key and the lines of --api-key-file; empty: no key is needed. Holds digests, not keys."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises OSError if the file can't be read, or is none that can be read to its end at once."""
        self._settings = settings
        self._digests = self._read()

    def reload(self) -> None:
        """Reads the file again; one that can't be read leaves the old keys."""
        try:
            self._digests = self._read()
        except (OSError, ValueError) as error:
            logger.error("--api-key-file %s: %s; the old keys stay", self._settings.api_key_file, error)
            return
        logger.info("%d API keys read", len(self._digests))

    @property
    def is_needed(self) -> bool:
        """With an empty file nobody gets in: it is no way to switch keys off."""
        return bool(self._digests) or self._settings.api_key_file is not None

    def accepts(self, authorization: str) -> bool:
        """Whether an Authorization header carries one of the keys; takes the same time for any wrong one."""
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches) and scheme.lower() == "bearer"

    def _read(self) -> list[bytes]:
        keys = [key.encode() for key in self._settings.api_key]
        if self._settings.api_key_file is not None:
            lines = _read_file(self._settings.api_key_file).splitlines()
            keys += [line.strip() for line in lines if line.strip() and not line.startswith(b"#")]
        return [_digest(key) for key in keys]


def _read_file(path: str) -> bytes:
    """Of a regular file: a FIFO or a terminal would hold up whoever reads it, in open() already."""
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a regular file")
        return file.read()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
