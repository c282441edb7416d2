"""BlockPool: which KV blocks are free, shared or cached."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import tokring_kernels

BlockIds = NDArray[np.int64]


class BlockPool:
    """Reference-counted KV blocks 0 … num_blocks - 1; natively kept, O(1) a block.

    A block is in use (references > 0), free without content (on a stack), or free with cached content (in the LRU
    list, handed out last, oldest first). PrefixCache says what content is.
    """

    def __init__(self, num_blocks: int) -> None:
        self.native = tokring_kernels.BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.references = self.native.references  # int32[num_blocks], a view
        self.cached = self.native.cached  # bool[num_blocks], a view: its content can be found

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return self.native.num_free

    def allocate(self, count: int) -> BlockIds | None:
        """Take `count` blocks with one reference each; int64[count], or None (and nothing taken) if fewer are free."""
        return self.native.allocate(count)

    def share(self, blocks: BlockIds) -> None:
        """Add one reference to each of `blocks`: blocks in use, or free ones with cached content."""
        self.native.share(blocks)

    def release(self, blocks: BlockIds | NDArray[np.int32]) -> None:
        """Drop one reference from each of `blocks` (no id twice), in the order of the sequence that held them.

        Blocks no longer referenced become free: the last of the sequence is the first to be evicted, since a prefix is
        worth more than what follows it. Raises ValueError, with nothing changed, if one of them is free already.
        """
        self.native.release(blocks)

    @property
    def num_cached(self) -> int:
        """Blocks with content that can be found, free or in use."""
        return int(np.count_nonzero(self.cached))

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one place, and found by its digest. For tests."""
        stack, queue = self.native.stack(), self.native.queue()
        free = np.sort(np.concatenate((stack, queue)))
        assert np.array_equal(free, np.flatnonzero(self.references == 0)), "free lists and reference counts differ"
        assert len(free) == self.num_free, f"{len(free)} blocks are free, {self.num_free} are counted"
        assert not self.cached[stack].any() and self.cached[queue].all(), "a free block is in the wrong list"
        assert self.native.index_is_sound(), "the index and the blocks' digests differ"
