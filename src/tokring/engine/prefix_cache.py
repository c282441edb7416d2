"""PrefixCache: finds KV blocks whose whole prefix was computed before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tokring.engine.block_pool import BlockIds, BlockPool

BlockHash = bytes


class _Digest(Protocol):
    def digest(self) -> bytes: ...


def _blake2b(data: bytes) -> _Digest:
    return hashlib.blake2b(data, digest_size=32)


_HASHES: dict[str, Callable[[bytes], _Digest]] = {"sha256": hashlib.sha256, "blake2b": _blake2b}


_NO_BLOCKS = np.zeros(0, np.intp)


class PrefixCache:
    """Content-addressed full blocks: hash of block i = H(hash of block i - 1 | its token ids).

    The chain starts from a root per tenant (cache salt) and adapter, so that nobody can probe for, or hit, another
    tenant's prompts. Several blocks may hold the same content (computed side by side); the first one is found.
    """

    def __init__(self, pool_blocks: int, block_size: int, algorithm: Literal["sha256", "blake2b"] = "sha256") -> None:
        self.block_size = block_size
        self.pool = BlockPool(pool_blocks, on_evict=self._forget)
        self._hash = _HASHES[algorithm]
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    def root(self, salt: bytes = b"", adapter: int = 0) -> BlockHash:
        """Where the chain of one tenant starts."""
        return self._hash(b"tokring prefix\0" + adapter.to_bytes(4, "little") + salt).digest()

    def extend_chain(
        self, chain: list[BlockHash], root: BlockHash, token_ids: NDArray[np.int32], num_tokens: int
    ) -> None:
        """Append to `chain` the hashes of the full blocks among token_ids[:num_tokens] that it lacks."""
        first, stop = len(chain), num_tokens // self.block_size
        if first >= stop:
            return
        previous = chain[-1] if chain else root
        width = 4 * self.block_size
        data = token_ids[first * self.block_size : stop * self.block_size].tobytes()
        new_hash = self._hash
        for offset in range(0, len(data), width):
            previous = new_hash(previous + data[offset : offset + width]).digest()
            chain.append(previous)

    def find(self, chain: Sequence[BlockHash], max_blocks: int) -> BlockIds:
        """Longest cached prefix of `chain`, at most max_blocks: intp block ids, not yet shared."""
        if not chain or chain[0] not in self._block_of:
            return _NO_BLOCKS
        found: list[int] = []
        block_of = self._block_of
        for block_hash in chain[:max_blocks]:
            block = block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return np.array(found, np.intp)

    def insert(self, chain: Sequence[BlockHash], blocks: BlockIds | NDArray[np.int32]) -> None:
        """Make computed `blocks` (in use) findable under the equally long `chain`; content known already is skipped."""
        new: list[int] = []
        for block_hash, block in zip(chain, blocks.tolist(), strict=True):
            if block_hash not in self._block_of and block not in self._hash_of:
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash
                new.append(block)
        if new:
            self.pool.mark_cached(np.array(new, np.intp))

    def invalidate(self, blocks: BlockIds | NDArray[np.int32]) -> None:
        """Forget `blocks`, all in use, whose content proved unsound."""
        self._forget(blocks[self.pool.cached[blocks]])
        self.pool.cached[blocks] = False

    def reset(self) -> None:
        """Forget everything cached; blocks in use stay with their requests but can't be found any more."""
        self._block_of.clear()
        self._hash_of.clear()
        self.pool.forget_cached()

    def check(self) -> None:
        """Raise AssertionError unless both directions of the index agree with the pool. For tests."""
        self.pool.check()
        assert {block: h for h, block in self._block_of.items()} == self._hash_of, (
            "the two directions of the index differ"
        )
        assert np.array_equal(np.flatnonzero(self.pool.cached), sorted(self._hash_of)), "index and pool differ"

    def _forget(self, blocks: BlockIds | NDArray[np.int32]) -> None:
        for block in blocks.tolist():
            del self._block_of[self._hash_of.pop(block)]
