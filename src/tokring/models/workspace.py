"""Workspace: a step's preallocated activations, numpy arrays for kernels and torch tensors for linears."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokring.models.linear import MAX_TILE_ROWS
from tokring.models.tile_sizes import TileSizes

Float32 = NDArray[np.float32]


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A numpy view; bfloat16 becomes its bits in uint16, which is what the kernels take."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@dataclass(frozen=True, slots=True)
class LinearInput:
    """Rows that a kernel writes and a linear reads, in the linear's dtype."""

    array: NDArray[Any]  # [num_rows, width]
    padded: torch.Tensor  # the same rows and what pads the last tile: finite, without meaning


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceWidths:
    """Row widths of a decoder's linear inputs."""

    hidden: int
    query: int
    intermediate: int


class Workspace:
    """Buffers for at least `num_tokens` tokens."""

    def __init__(self, num_tokens: int, widths: WorkspaceWidths, dtype: torch.dtype, tile_sizes: TileSizes) -> None:
        self.capacity = -(-num_tokens // MAX_TILE_ROWS) * MAX_TILE_ROWS
        self._tile_sizes = tile_sizes
        self._hidden = torch.zeros(self.capacity, widths.hidden)
        self._branch = torch.zeros(self.capacity, widths.hidden)
        self._normed = torch.zeros(self.capacity, widths.hidden, dtype=dtype)
        self._attended = torch.zeros(self.capacity, widths.query, dtype=dtype)
        self._gated = torch.zeros(self.capacity, widths.intermediate, dtype=dtype)

    def activations(self, num_tokens: int) -> "StepActivations":
        """Views of the first `num_tokens` rows."""
        return StepActivations(
            num_tokens=num_tokens,
            hidden=self._hidden[:num_tokens],
            hidden_array=self._hidden[:num_tokens].numpy(),
            branch=self._branch[:num_tokens],
            normed=self._linear_input(self._normed, num_tokens),
            attended=self._linear_input(self._attended, num_tokens),
            gated=self._linear_input(self._gated, num_tokens),
        )

    def head_input(self, num_rows: int) -> LinearInput:
        """Rows for the head. They share memory with `normed`, which no layer needs any more by then."""
        return self._linear_input(self._normed, num_rows)

    def _linear_input(self, buffer: torch.Tensor, num_rows: int) -> LinearInput:
        return LinearInput(as_array(buffer[:num_rows]), buffer[: self._tile_sizes.padded(num_rows)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepActivations:
    """One step's T rows of every buffer, sliced once and shared by all layers."""

    num_tokens: int
    hidden: torch.Tensor  # float32[T, hidden]: the residual stream
    hidden_array: Float32  # the same memory
    branch: torch.Tensor  # float32[T, hidden]: what attention or MLP adds to it, where that needs a norm first
    normed: LinearInput  # [T, hidden]
    attended: LinearInput  # [T, heads * head_dim]
    gated: LinearInput  # [T, intermediate]
