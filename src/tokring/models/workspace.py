"""Workspace: a step's preallocated activations, all float32."""

from dataclasses import dataclass

import numpy as np

from tokring.models.linear import Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceWidths:
    """Row widths of a decoder's activations."""

    hidden: int
    query: int
    qkv: int
    intermediate: int
    vocabulary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepActivations:
    """One step's T rows of every buffer, sliced once and shared by all layers."""

    hidden: Float32  # [T, hidden]: the residual stream
    branch: Float32  # [T, hidden]: what attention or MLP adds to it
    qkv: Float32  # [T, (heads + 2 * kv_heads) * head_dim]
    gate_up: Float32  # [T, 2 * intermediate]
    normed: Float32  # [T, hidden]
    attended: Float32  # [T, heads * head_dim]
    gated: Float32  # [T, intermediate]


class Workspace:
    """Buffers for `num_tokens` tokens."""

    def __init__(self, num_tokens: int, widths: WorkspaceWidths) -> None:
        self.capacity = num_tokens
        self._hidden = self._buffer(widths.hidden)
        self._branch = self._buffer(widths.hidden)
        self._qkv = self._buffer(widths.qkv)
        self._gate_up = self._buffer(2 * widths.intermediate)
        self._normed = self._buffer(widths.hidden)
        self._attended = self._buffer(widths.query)
        self._gated = self._buffer(widths.intermediate)
        self._logits = np.zeros((0, widths.vocabulary), np.float32)

    def activations(self, num_tokens: int) -> StepActivations:
        """Views of the first `num_tokens` rows."""
        return StepActivations(
            hidden=self._hidden[:num_tokens],
            branch=self._branch[:num_tokens],
            qkv=self._qkv[:num_tokens],
            gate_up=self._gate_up[:num_tokens],
            normed=self._normed[:num_tokens],
            attended=self._attended[:num_tokens],
            gated=self._gated[:num_tokens],
        )

    def head_input(self, num_rows: int) -> Float32:
        """Rows for the head. They share memory with `normed`, which no layer needs any more by then."""
        return self._normed[:num_rows]

    def logits(self, num_rows: int) -> Float32:
        """[num_rows, vocabulary], the same memory at each call; grows with the largest batch so far."""
        if num_rows > len(self._logits):
            self._logits = np.empty((num_rows, self._logits.shape[1]), np.float32)
        return self._logits[:num_rows]

    def _buffer(self, width: int) -> Float32:
        return np.zeros((self.capacity, width), np.float32)
