"""TensorSource: where a checkpoint's weights come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

from tokring.checkpoint.quantized_tensor import QuantizedTensor


class TensorSource(Protocol):
    """Weights by Hugging Face name. Every tensor's extent was checked against its file when the source was made."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def total_bytes(self) -> int:
        """Bytes that all tensors take in the files."""
        ...

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """float32, float16 or uint16 (bfloat16's bits), maybe a read-only view of the file. Raises CheckpointError."""
        ...

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Raw blocks, or None where the tensor isn't stored in one of `BLOCK_SIZES`' kinds."""
        ...
