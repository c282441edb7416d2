"""Workspace: a step's preallocated activations, numpy arrays for kernels and torch tensors for linears."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokring.models.linear import ROWS_PER_TILE, padded_rows

Float32 = NDArray[np.float32]


class Activation:
    """A buffer of rows that kernels write in float32 and linears read in their own dtype.

    In float32 both are the same memory; in bfloat16 `as_input` rounds into a second buffer.
    """

    def __init__(self, capacity: int, width: int, dtype: torch.dtype) -> None:
        self.tensor = torch.zeros(capacity, width)
        self._input = self.tensor if dtype == torch.float32 else torch.zeros(capacity, width, dtype=dtype)

    def rows(self, num_rows: int) -> "ActivationRows":
        padded = padded_rows(num_rows, self._input.dtype)
        return ActivationRows(self.tensor[:num_rows], self._input[:num_rows], self._input[:padded])


class ActivationRows:
    """The rows of an Activation that one step uses."""

    def __init__(self, tensor: torch.Tensor, rounded: torch.Tensor, padded: torch.Tensor) -> None:
        self.tensor = tensor  # float32[num_rows, width]
        self.array: Float32 = tensor.numpy()  # the same memory
        self._rounded = rounded
        self._padded = padded
        self._must_round = rounded.dtype != torch.float32

    def as_input(self) -> torch.Tensor:
        """What a Linear takes: padded to its number of rows. What the padding holds is finite and means nothing."""
        if self._must_round:
            self._rounded.copy_(self.tensor)
        return self._padded


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceWidths:
    """Row widths of a decoder's activations."""

    hidden: int
    query: int
    key: int
    gate_up: int
    intermediate: int


class Workspace:
    """Buffers for `capacity` tokens, a multiple of ROWS_PER_TILE."""

    def __init__(self, num_tokens: int, widths: WorkspaceWidths, dtype: torch.dtype) -> None:
        self.capacity = -(-num_tokens // ROWS_PER_TILE) * ROWS_PER_TILE
        self._hidden = torch.zeros(self.capacity, widths.hidden)
        self._branch = torch.zeros(self.capacity, widths.hidden)
        self._query = torch.zeros(self.capacity, widths.query)
        self._key = torch.zeros(self.capacity, widths.key)
        self._value = torch.zeros(self.capacity, widths.key)
        self._gate_up = torch.zeros(self.capacity, widths.gate_up)
        self._normed = Activation(self.capacity, widths.hidden, dtype)
        self._attended = Activation(self.capacity, widths.query, dtype)
        self._gated = Activation(self.capacity, widths.intermediate, dtype)

    def views(self, num_tokens: int) -> "StepActivations":
        return StepActivations(
            num_tokens=num_tokens,
            hidden=self._hidden[:num_tokens],
            branch=self._branch[:num_tokens],
            query=self._query[:num_tokens],
            key=self._key[:num_tokens],
            value=self._value[:num_tokens],
            gate_up=self._gate_up[:num_tokens],
            normed=self._normed.rows(num_tokens),
            attended=self._attended.rows(num_tokens),
            gated=self._gated.rows(num_tokens),
        )

    def selected(self, num_rows: int) -> ActivationRows:
        """Rows for the head; takes the buffer of `normed`, which no layer needs any more by then."""
        return self._normed.rows(num_rows)


@dataclass(slots=True, kw_only=True)
class StepActivations:
    """A step's T rows of every buffer, sliced once and shared by all layers. float32 unless a linear reads them."""

    num_tokens: int
    hidden: torch.Tensor  # [T, hidden] the residual stream
    branch: torch.Tensor  # [T, hidden] what attention or MLP adds to it
    query: torch.Tensor  # [T, heads * head_dim]
    key: torch.Tensor  # [T, kv_heads * head_dim]
    value: torch.Tensor  # [T, kv_heads * head_dim]
    gate_up: torch.Tensor  # [T, 2 * intermediate]
    normed: ActivationRows  # [T, hidden]
    attended: ActivationRows  # [T, heads * head_dim]
    gated: ActivationRows  # [T, intermediate]
