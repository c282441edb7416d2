"""ApiKeys: the keys that open the API, compared in constant time."""

import hashlib
import hmac
import logging
from pathlib import Path

from tokring.config import ServerSettings

logger = logging.getLogger(__name__)


class ApiKeys:
    """--api-key and the lines of --api-key-file; empty: no key is needed. Holds digests, not keys."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises OSError if the file can't be read."""
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
            lines = Path(self._settings.api_key_file).read_bytes().splitlines()
            keys += [line.strip() for line in lines if line.strip() and not line.startswith(b"#")]
        return [_digest(key) for key in keys]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
