"""Linear: what the decoder asks of a matrix, and the native one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tokring.models.errors import ModelError
from tokring_kernels import PackedLinear
from tokring_kernels.linear import WeightKind

Float32 = NDArray[np.float32]
ActivationBits = Literal[8, 15]  # what activations are rounded to in front of quantized weights
INPUTS_MULTIPLE = 32  # what the bfloat16 and quantized kernels take


class Linear(Protocol):
    """y = x Wᵀ + b with W [num_outputs, num_inputs]; the bits of a row depend on that row alone."""

    num_inputs: int
    num_outputs: int

    def apply(self, x: Float32, out: Float32) -> None:
        """out[T, num_outputs] of x[T, num_inputs]."""
        ...


@dataclass(frozen=True, slots=True)
class NativePart:
    """Weight rows of one kind: float32 or bfloat16 bits [rows, num_inputs], or a GGUF tensor's uint8[rows, bytes]."""

    kind: WeightKind
    data: NDArray[Any]


class NativeLinear:
    """Weights in float32, bfloat16 or 4 and 8 bit blocks, float32 rows in and out, on tokring's own kernels."""

    def __init__(
        self,
        parts: Sequence[NativePart],
        num_inputs: int,
        bias: Float32 | None = None,
        activation_bits: ActivationBits = 15,
    ) -> None:
        """`parts` lie one below the other, each a matrix of its own. Raises ModelError."""
        if num_inputs % INPUTS_MULTIPLE and any(part.kind != "F32" for part in parts):
            raise ModelError(
                f"a matrix with {num_inputs} inputs needs --dtype float32: "
                f"the bfloat16 kernels take multiples of {INPUTS_MULTIPLE}"
            )
        self.num_inputs = num_inputs
        self.matrices = [PackedLinear(part.kind, part.data, num_inputs) for part in parts]
        self.bias = bias
        self.activation_bits = activation_bits
        self._stops = np.cumsum([matrix.outputs for matrix in self.matrices]).tolist()
        self.num_outputs = int(self._stops[-1])

    def apply(self, x: Float32, out: Float32) -> None:
        start = 0
        for matrix, stop in zip(self.matrices, self._stops, strict=True):
            matrix.apply(x, out[:, start:stop], activation_bits=self.activation_bits)
            start = stop
        if self.bias is not None:
            out += self.bias
