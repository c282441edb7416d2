"""BlockTable: the KV blocks of every running request, by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Rows = NDArray[np.intp] | Int32


class BlockTable:
    """block_ids int32[num_rows, max_blocks], of which row r uses the first num_blocks[r]; the rest is stale."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.block_ids = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self._flat = self.block_ids.reshape(-1)

    def row(self, row: int) -> Int32:
        """Block ids of one row, in order; a view."""
        return self.block_ids[row, : self.num_blocks[row]]

    def append(self, rows: Rows, counts: Int32, blocks: Int32) -> None:
        """Append counts[i] of `blocks`, taken in order, to rows[i]; rows are distinct, counts at least 1."""
        used = self.num_blocks[rows]
        first = np.cumsum(counts) - counts
        start = rows * self.max_blocks + used - first
        self._flat[np.repeat(start, counts) + np.arange(len(blocks))] = blocks
        self.num_blocks[rows] = used + counts

    def append_one(self, rows: Rows, blocks: Int32) -> None:
        """Append blocks[i] to rows[i]; rows are distinct."""
        used = self.num_blocks[rows]
        self._flat[rows * self.max_blocks + used] = blocks
        self.num_blocks[rows] = used + 1

    def fill(self, row: int, blocks: Int32) -> None:
        """Give an empty row its blocks."""
        self.block_ids[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)

    def take(self, row: int) -> Int32:
        """Empty a row and return what it held (a copy)."""
        blocks = self.row(row).copy()
        self.num_blocks[row] = 0
        return blocks

    def move(self, source: int, target: int) -> None:
        """Move a row into an empty one."""
        used = self.num_blocks[source]
        self.block_ids[target, :used] = self.block_ids[source, :used]
        self.num_blocks[target] = used
        self.num_blocks[source] = 0

    def slot_mapping(self, rows: Rows, positions: Int32) -> Int64:
        """Cache slots of positions[t] of rows[t]; int64[T], cache_slot = block_id * block_size + offset.

        The caller has made sure that each position has a block.
        """
        block, offset = np.divmod(positions, np.int32(self.block_size))
        slots = self._flat[rows * self.max_blocks + block].astype(np.int64)
        slots *= self.block_size
        slots += offset
        return slots
