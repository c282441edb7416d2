"""QuantizedTensor: a weight matrix as raw GGUF blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Kinds handed out raw: (weights per block, bytes per block). Layouts are ggml's:
#: q4_0 = f16 scale, 16 bytes of nibbles; q4_1 = f16 scale, f16 minimum, 16 bytes of nibbles; q8_0 = f16 scale, 32 int8.
#: Nibble j (low half of byte j) is weight j, the high half is weight j + 16.
BLOCK_SIZES = {"q4_0": (32, 18), "q4_1": (32, 20), "q8_0": (32, 34)}

_BLOCKS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix of `shape` (rows, columns); `data` is uint8[rows, columns / 32 * bytes per block], C-contiguous.

    `data` may be a read-only view of the mapped file.
    """

    kind: str
    shape: tuple[int, int]
    data: npt.NDArray[np.uint8]

    def dequantize(self) -> npt.NDArray[np.float32]:
        """float32[rows, columns], with the gguf library's bits."""
        return dequantize_blocks(self.kind, self.data).reshape(self.shape)


def dequantize_blocks(kind: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """float32[..., columns] of uint8[..., bytes per row]; `kind` in any case ("q4_k", "IQ4_XS").

    The kinds of BLOCK_SIZES are computed here, with the gguf library's bits; all others by the library.
    Raises NotImplementedError for a kind that the library can't dequantize.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale gives NaN, which the sampler reports
        if kind.lower() in BLOCK_SIZES:
            return _dequantize_common(kind.lower(), blocks)
        import gguf  # here and not above: it costs 0.2 s, which most models need not pay

        values: npt.NDArray[np.float32] = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()])
    return values


def _dequantize_common(kind: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Some thousand blocks at a time, which stay in the core's cache: the library takes ten times as long."""
    block, block_bytes = BLOCK_SIZES[kind]
    flat = blocks.reshape(-1, block_bytes)
    values = np.empty((len(flat), block), np.float32)
    for start in range(0, len(flat), _BLOCKS_AT_ONCE):
        part, out = flat[start : start + _BLOCKS_AT_ONCE], values[start : start + _BLOCKS_AT_ONCE]
        scales = _float16_columns(part, 0)
        if kind == "q8_0":
            np.multiply(part[:, 2:].view(np.int8), scales, out=out)
            continue
        nibbles = part[:, block_bytes - block // 2 :]
        out[:, : block // 2], out[:, block // 2 :] = nibbles & 15, nibbles >> 4
        if kind == "q4_0":
            out -= np.float32(8)
        out *= scales
        if kind == "q4_1":
            out += _float16_columns(part, 2)
    return values.reshape(*blocks.shape[:-1], blocks.shape[-1] // block_bytes * block)


def _float16_columns(blocks: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[np.float32]:
    """float32[blocks, 1] of the float16 at this byte of each block."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)
