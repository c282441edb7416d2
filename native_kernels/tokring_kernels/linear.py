"""Linear layers whose weights stay as they are stored: float32, bfloat16, or GGUF's 4 and 8 bit blocks."""

from typing import Literal

from tokring_kernels import _cpu
from tokring_kernels.array import Array

WeightKind = Literal["F32", "BF16", "Q4_0", "Q4_1", "Q8_0"]


class PackedLinear:
    """A weight matrix [outputs, inputs], repacked once for the kernels; y = x W^T.

    kind: F32 takes rows float32[outputs, inputs], BF16 their bits, Q4_0, Q4_1 and Q8_0 the rows of a GGUF tensor,
    uint8[outputs, inputs / 32 * (18, 20 or 34)]. inputs is a multiple of 32, but for F32. The rows are not needed
    afterwards.
    Raises ValueError for an unknown kind or rows that don't fit it.
    """

    def __init__(self, kind: WeightKind, rows: Array, inputs: int) -> None:
        self.native = _cpu.PackedLinear(kind, rows, inputs)
        self.kind = kind
        self.input_form = kind if kind in ("F32", "BF16") else "integers"  # what rows of x are rounded to
        self.outputs = self.native.outputs
        self.inputs = self.native.inputs
        self.num_bytes = self.native.num_bytes

    def apply(self, x: Array, out: Array, *, activation_bits: int = 15, num_threads: int = 0) -> None:
        """out[m, outputs] = x[m, inputs] W^T, both float32, row stride free.

        With quantized weights x is rounded, by blocks of 32, to integers of 15 bits (or 8, as llama.cpp does), and the
        integer sums are exact; with BF16 weights x is rounded to bfloat16. A row's bits do not depend on the other rows
        nor on threads, and but for BF16 are the same on every level that has an FMA. A block with NaN or
        infinity makes its whole output row NaN.
        """
        self.native.apply(x, out, activation_bits, num_threads)
