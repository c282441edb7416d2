"""QuantizedTensor: a weight matrix as raw GGUF blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Kinds handed out raw: (weights per block, bytes per block). Layouts are ggml's:
#: q4_0 = f16 scale, 16 bytes of nibbles; q4_1 = f16 scale, f16 minimum, 16 bytes of nibbles; q8_0 = f16 scale, 32 int8.
#: Nibble j (low half of byte j) is weight j, the high half is weight j + 16.
BLOCK_SIZES = {"q4_0": (32, 18), "q4_1": (32, 20), "q8_0": (32, 34)}


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix of `shape` (rows, columns); `data` is uint8[rows, columns / 32 * bytes per block], C-contiguous.

    `data` may be a read-only view of the mapped file.
    """

    kind: str
    shape: tuple[int, int]
    data: npt.NDArray[np.uint8]

    def dequantize(self) -> npt.NDArray[np.float32]:
        """float32[rows, columns], as the gguf library computes it."""
        return dequantize_blocks(self.kind, self.data).reshape(self.shape)


def dequantize_blocks(kind: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """float32[..., columns] of uint8[..., bytes per row] by the gguf library; `kind` in any case ("q4_k", "IQ4_XS").

    Raises NotImplementedError for a kind that the library can't dequantize.
    """
    import gguf  # here and not above: it costs 0.2 s, which a front end need not pay

    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale gives NaN, which the sampler reports
        values: npt.NDArray[np.float32] = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()])
    return values
