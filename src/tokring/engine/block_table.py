"""BlockTable: the KV blocks of every running request, by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
