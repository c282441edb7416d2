"""BlockTable: the KV blocks of every running request, by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokring.engine.block_pool import BlockIds

Int32 = NDArray[np.int32]


class BlockTable:
    """block_ids int32[num_rows, max_blocks], of which row r uses the first num_blocks[r]; the rest is stale."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.block_ids = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)

    def row(self, row: int) -> Int32:
        """Block ids of one row, in order; a view."""
        return self.block_ids[row, : self.num_blocks[row]]

    def fill(self, row: int, blocks: BlockIds | Int32) -> None:
        """Give an empty row its blocks."""
        self.block_ids[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)

    def take(self, row: int) -> Int32:
        """Empty a row and return what it held (a view, valid until the row is filled)."""
        blocks = self.row(row)
        self.num_blocks[row] = 0
        return blocks

    def move(self, source: int, target: int) -> None:
        """Move a row into an empty one."""
        used = self.num_blocks[source]
        self.block_ids[target, :used] = self.block_ids[source, :used]
        self.num_blocks[target] = used
        self.num_blocks[source] = 0
