"""BlockPool: which KV blocks are free, shared or cached."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import tokring_kernels

BlockIds = NDArray[np.int64]


class BlockPool:
    """Reference-counted KV blocks 0 … num_blocks - 1; natively kept, O(1) a block.

    A block is in use (references > 0), free without content (on a stack), or free with cached content (in the LRU
    list, handed out last, oldest first).
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[BlockIds], None] | None = None) -> None:
        """`on_evict` is told the ids of cached blocks whose content is about to be overwritten."""
        self.native = tokring_kernels.BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.references = self.native.references  # int32[num_blocks], a view
        self.cached = self.native.cached  # bool[num_blocks], a view: the prefix cache finds the block's content
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return self.native.num_free

    def allocate(self, count: int) -> BlockIds | None:
        """Take `count` blocks with one reference each; int64[count], or None (and nothing taken) if fewer are free."""
        taken = self.native.allocate(count)
        if taken is None:
            return None
        blocks, num_evicted = taken
        if num_evicted:
            self.evict(blocks[count - num_evicted :])
        return blocks

    def evict(self, blocks: BlockIds) -> None:
        """Tell that the cached content of these blocks is gone."""
        if self._on_evict is not None and len(blocks):
            self._on_evict(blocks)

    def share(self, blocks: BlockIds) -> None:
        """Add one reference to each of `blocks`: blocks in use, or free ones with cached content."""
        self.native.share(blocks)

    def release(self, blocks: BlockIds | NDArray[np.int32]) -> None:
        """Drop one reference from each of `blocks` (no id twice), in the order of the sequence that held them.

        Blocks no longer referenced become free: the last of the sequence is the first to be evicted, since a prefix is
        worth more than what follows it. Raises ValueError, with nothing changed, if one of them is free already.
        """
        self.native.release(blocks)

    def mark_cached(self, blocks: BlockIds) -> None:
        """Note that `blocks`, all in use, hold content that the prefix cache can find."""
        self.cached[blocks] = True

    @property
    def num_cached(self) -> int:
        """Blocks with content that can be found, free or in use."""
        return int(np.count_nonzero(self.cached))

    def forget_cached(self) -> None:
        """Drop all cached content: free blocks become plain ones, blocks in use go to the stack once released."""
        self.native.forget_cached()

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one place. For tests."""
        stack, queue = self.native.stack(), self.native.queue()
        free = np.sort(np.concatenate((stack, queue)))
        assert np.array_equal(free, np.flatnonzero(self.references == 0)), "free lists and reference counts differ"
        assert len(free) == self.num_free, f"{len(free)} blocks are free, {self.num_free} are counted"
        assert not self.cached[stack].any() and self.cached[queue].all(), "a free block is in the wrong list"
