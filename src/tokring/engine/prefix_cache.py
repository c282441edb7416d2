"""PrefixCache: finds KV blocks whose whole prefix was computed before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.block_pool import BlockIds, BlockPool
from tokring.engine.kv_event_log import KvEventLog

DIGEST_BYTES = 32


class _Digest(Protocol):
    def digest(self) -> bytes: ...


def _blake2b(data: bytes) -> _Digest:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES)


_HASHES: dict[str, Callable[[bytes], _Digest]] = {"sha256": hashlib.sha256, "blake2b": _blake2b}


class PrefixCache:
    """Content-addressed full blocks: digest of block i = H(digest of block i - 1 | its token ids).

    The chain of digests (one `bytes`, 32 for each block) starts from a root per tenant (cache salt) and adapter, so
    that nobody can probe for, or hit, another tenant's prompts. Several blocks may hold the same content (computed side
    by side); the first one is found.
    """

    def __init__(self, pool_blocks: int, block_size: int, algorithm: Literal["sha256", "blake2b"] = "sha256") -> None:
        self.block_size = block_size
        self.pool = BlockPool(pool_blocks)
        self._hash = _HASHES[algorithm]
        self._is_sha256 = algorithm == "sha256"
        self.events: KvEventLog | None = None  # where its changes are told; None: nobody follows them

    def root(self, salt: bytes = b"", adapter: int = 0) -> bytes:
        """Where the chain of one tenant starts."""
        return self._hash(b"tokring prefix\0" + adapter.to_bytes(4, "little") + salt).digest()

    def extend_chain(self, chain: bytes, root: bytes, token_ids: NDArray[np.int32], num_tokens: int) -> bytes:
        """Return `chain` with the digests of those full blocks among token_ids[:num_tokens] that it lacks."""
        if self._is_sha256:
            return tokring_kernels.sha256_chain(chain, root, token_ids, num_tokens, self.block_size)
        first, stop = len(chain) // DIGEST_BYTES, num_tokens // self.block_size
        previous = chain[-DIGEST_BYTES:] if chain else root
        new_hash, width = self._hash, 4 * self.block_size
        data = token_ids[first * self.block_size : stop * self.block_size].tobytes()
        digests = [chain]
        for offset in range(0, len(data), width):
            previous = new_hash(previous + data[offset : offset + width]).digest()
            digests.append(previous)
        return b"".join(digests)

    def find(self, chain: bytes, max_blocks: int) -> BlockIds:
        """Longest cached prefix of `chain`, at most max_blocks: int64 block ids, not yet shared."""
        return self.pool.native.find(chain, max_blocks)

    def insert(self, chain: bytes, first: int, blocks: BlockIds | NDArray[np.int32]) -> None:
        """Make computed `blocks` (in use) findable under chain[first], …; content known already is skipped."""
        self.pool.native.insert(chain, first, blocks)

    def invalidate(self, blocks: BlockIds | NDArray[np.int32]) -> None:
        """Forget `blocks`, all in use, whose content proved unsound."""
        self.pool.native.forget(blocks)

    def reset(self) -> None:
        """Forget everything cached; blocks in use stay with their requests but can't be found any more."""
        self.pool.native.forget_all()
