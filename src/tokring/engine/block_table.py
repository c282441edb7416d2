"""BlockTable: the KV blocks of every running request, by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Rows = NDArray[np.intp] | Int32
BlockIds = NDArray[np.intp] | Int32


class BlockTable:
    """block_ids int32[num_rows, max_blocks], of which row r uses the first num_blocks[r]; the rest is stale."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.block_ids = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self.capacity = np.zeros(num_rows, np.int32)  # tokens that the row's blocks hold
        self._flat = self.block_ids.reshape(-1)
        self._first_entry = np.arange(num_rows, dtype=np.intp) * max_blocks  # of each row, in _flat
        # A power of two: integer division is the slowest thing that could be done for every token.
        self._block_shift = np.int32(block_size.bit_length() - 1)
        self._offset_mask = np.int32(block_size - 1)

    def row(self, row: int) -> Int32:
        """Block ids of one row, in order; a view."""
        return self.block_ids[row, : self.num_blocks[row]]

    def append(self, rows: Rows, counts: Int32, blocks: BlockIds) -> None:
        """Append counts[i] of `blocks`, taken in order, to rows[i]; rows are distinct, counts at least 1."""
        used = self.num_blocks[rows]
        first = np.cumsum(counts) - counts
        start = self._first_entry[rows] + used - first
        self._flat[np.repeat(start, counts) + np.arange(len(blocks))] = blocks
        self.num_blocks[rows] = used + counts
        self.capacity[rows] += counts * np.int32(self.block_size)

    def append_one(self, rows: Rows, blocks: BlockIds) -> None:
        """Append blocks[i] to rows[i]; rows are distinct."""
        used = self.num_blocks[rows]
        self._flat[self._first_entry[rows] + used] = blocks
        self.num_blocks[rows] = used + 1
        self.capacity[rows] += self.block_size

    def fill(self, row: int, blocks: BlockIds) -> None:
        """Give an empty row its blocks."""
        self.block_ids[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.capacity[row] = len(blocks) * self.block_size

    def take(self, row: int) -> Int32:
        """Empty a row and return what it held (a copy)."""
        blocks = self.row(row).copy()
        self.num_blocks[row] = 0
        self.capacity[row] = 0
        return blocks

    def move(self, source: int, target: int) -> None:
        """Move a row into an empty one."""
        used = self.num_blocks[source]
        self.block_ids[target, :used] = self.block_ids[source, :used]
        self.num_blocks[target] = used
        self.num_blocks[source] = 0
        self.capacity[target] = self.capacity[source]
        self.capacity[source] = 0

    def slot_mapping(self, rows: Rows | slice, positions: Int32) -> Int64:
        """Cache slots of positions[t] of rows[t]; int64[T], cache_slot = block_id * block_size + offset.

        The caller has made sure that each position has a block.
        """
        entry = self._first_entry[rows] + (positions >> self._block_shift)
        slots: Int64 = self._flat[entry].astype(np.int64)
        slots <<= self._block_shift
        slots += positions & self._offset_mask
        return slots
