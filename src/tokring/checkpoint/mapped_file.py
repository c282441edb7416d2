"""MappedFile: a file mapped read-only, from which bounded pieces are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.checkpoint.errors import CheckpointError


class MappedFile:
    """A whole file as uint8. Arrays taken from it keep the mapping alive; nothing has to be closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.stat().st_size == 0:
                raise CheckpointError(path, "is empty")
            # A plain ndarray over the mapping: memmap's subclass machinery would run on every slice.
            self.data: npt.NDArray[np.uint8] = np.asarray(np.memmap(path, dtype=np.uint8, mode="r")).view(np.ndarray)
        except (OSError, ValueError) as error:
            raise CheckpointError(path, f"can't be read: {getattr(error, 'strerror', None) or error}") from None
        self.size = int(self.data.size)

    def array(self, offset: int, num_bytes: int, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """A view (a copy only where the offset isn't aligned to the type). Raises CheckpointError if out of bounds."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.size:
            raise CheckpointError(
                self.path, f"is truncated: {offset + num_bytes} bytes are described, the file has {self.size}"
            )
        element = np.dtype(dtype)
        piece = self.data[offset : offset + num_bytes]
        if offset % element.itemsize:
            piece = piece.copy()
        return piece.view(element).reshape(shape)
