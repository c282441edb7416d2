"""BlockPool: which KV blocks are free, shared or cached."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.intp]  # numpy indexes with intp ten times faster than with int32


class BlockPool:
    """Reference-counted KV blocks 0 … num_blocks - 1. Everything is vectorised over blocks, amortised O(1) a block.

    A block is in use (references > 0), free without content (on a stack), or free with cached content (in the LRU
    queue, handed out last, oldest first). Reviving a cached block does not search the queue: it bumps the block's
    stamp, and an entry counts only while its stamp is the block's. Stale entries are dropped when they reach the front
    or when the queue is compacted; each costs its share once.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[BlockIds], None] | None = None) -> None:
        """`on_evict` is told the ids of cached blocks whose content is about to be overwritten."""
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.references = np.zeros(num_blocks, np.int32)
        self.cached = np.zeros(num_blocks, np.bool_)
        self._on_evict = on_evict
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.intp)
        self._stack_size = num_blocks
        capacity = 2 * num_blocks
        self._queue_block = np.zeros(capacity, np.intp)
        self._queue_stamp = np.zeros(capacity, np.int64)
        self._queue_start = 0
        self._queue_stop = 0
        self._stamp = np.zeros(num_blocks, np.int64)

    def allocate(self, count: int) -> BlockIds | None:
        """Take `count` blocks with one reference each; intp[count], or None (and nothing taken) if fewer are free."""
        if count > self.num_free:
            return None
        from_stack = min(count, self._stack_size)
        self._stack_size -= from_stack
        blocks = self._stack[self._stack_size : self._stack_size + from_stack][::-1].copy()
        if from_stack < count:
            evicted = self._pop_oldest(count - from_stack)
            self.cached[evicted] = False
            if self._on_evict is not None:
                self._on_evict(evicted)
            blocks = np.concatenate((blocks, evicted)) if from_stack else evicted
        self.references[blocks] = 1
        self.num_free -= count
        return blocks

    def share(self, blocks: BlockIds) -> None:
        """Add one reference to each of `blocks` (no id twice): blocks in use, or free ones with cached content."""
        if not len(blocks):
            return
        references = self.references[blocks]
        free = blocks[references == 0]
        self._stamp[free] += 1
        self.num_free -= len(free)
        self.references[blocks] = references + 1

    def release(self, blocks: BlockIds) -> None:
        """Drop one reference from each of `blocks` (no id twice), in the order of the sequence that held them.

        Blocks no longer referenced become free: the last of the sequence is the first to be evicted, since a prefix is
        worth more than what follows it. Raises ValueError, with nothing changed, if one of them is free already.
        """
        references = self.references[blocks] - 1
        if references.any():
            if int(references.min()) < 0:
                freed = blocks[references < 0].tolist()
                raise ValueError(f"blocks {freed} are released but free already: a block table is wrong")
            self.references[blocks] = references
            free = blocks[references == 0][::-1]
        else:
            self.references[blocks] = 0
            free = blocks[::-1]
        self.num_free += len(free)
        cached = self.cached[free]
        num_cached = int(np.count_nonzero(cached))
        if num_cached == len(free):
            self._push_queue(free)
        else:
            self._push_stack(free[~cached])
            self._push_queue(free[cached])

    def mark_cached(self, blocks: BlockIds) -> None:
        """Note that `blocks`, all in use, hold content that the prefix cache can find."""
        self.cached[blocks] = True

    @property
    def num_cached(self) -> int:
        """Blocks with content that can be found, free or in use."""
        return int(np.count_nonzero(self.cached))

    def forget_cached(self) -> None:
        """Drop all cached content: free blocks become plain ones, blocks in use go to the stack once released."""
        free = self._pop_oldest(self.num_free - self._stack_size)
        self._push_stack(free)
        self.cached[:] = False

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one place. For tests."""
        stack = self._stack[: self._stack_size]
        entries = slice(self._queue_start, self._queue_stop)
        queued = self._queue_block[entries]
        queued = queued[self._queue_stamp[entries] == self._stamp[queued]]
        free = np.sort(np.concatenate((stack, queued)))
        assert np.array_equal(free, np.flatnonzero(self.references == 0)), "free lists and reference counts differ"
        assert len(free) == self.num_free, f"{len(free)} blocks are free, {self.num_free} are counted"
        assert not self.cached[stack].any() and self.cached[queued].all(), "a free block is in the wrong list"

    def _push_stack(self, blocks: BlockIds) -> None:
        self._stack[self._stack_size : self._stack_size + len(blocks)] = blocks
        self._stack_size += len(blocks)

    def _push_queue(self, blocks: BlockIds) -> None:
        if not len(blocks):
            return
        if self._queue_stop + len(blocks) > len(self._queue_block):
            self._compact()
        stop = self._queue_stop + len(blocks)
        self._stamp[blocks] += 1
        self._queue_block[self._queue_stop : stop] = blocks
        self._queue_stamp[self._queue_stop : stop] = self._stamp[blocks]
        self._queue_stop = stop

    def _pop_oldest(self, count: int) -> BlockIds:
        """Take `count` valid entries from the front of the queue; the caller knows that there are as many."""
        taken: list[BlockIds] = []
        while count:
            stop = min(self._queue_start + count, self._queue_stop)
            assert stop > self._queue_start, "the LRU queue lost a block"
            blocks = self._queue_block[self._queue_start : stop]
            blocks = blocks[self._queue_stamp[self._queue_start : stop] == self._stamp[blocks]]
            self._stamp[blocks] += 1
            self._queue_start = stop
            taken.append(blocks)
            count -= len(blocks)
        if len(taken) == 1:
            return taken[0]
        return np.concatenate(taken) if taken else np.zeros(0, np.intp)

    def _compact(self) -> None:
        """Drop stale entries; at most num_blocks are valid, so at least half of the queue is free afterwards."""
        entries = slice(self._queue_start, self._queue_stop)
        blocks, stamps = self._queue_block[entries], self._queue_stamp[entries]
        valid = stamps == self._stamp[blocks]
        size = int(np.count_nonzero(valid))
        self._queue_block[:size], self._queue_stamp[:size] = blocks[valid], stamps[valid]
        self._queue_start, self._queue_stop = 0, size
