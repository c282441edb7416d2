"""Packed layers with random weights, for tests of every level."""

import numpy as np
from numpy.typing import NDArray

from tokring_kernels import PackedLinear, reference

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
KINDS = ["F32", "BF16", *BLOCK_BYTES]


def make(kind: str, n: int, k: int, seed: int = 0) -> tuple[PackedLinear, NDArray[np.float32]]:
    """A packed layer with random weights, and its weights in float32."""
    rng = np.random.default_rng(seed)
    if kind == "F32":
        weight = rng.normal(size=(n, k)).astype(np.float32)
        return PackedLinear("F32", weight, k), weight
    if kind == "BF16":
        bits = reference.narrow(rng.normal(size=(n, k)).astype(np.float32))
        return PackedLinear("BF16", bits, k), reference.widen(bits)
    blocks = rng.integers(0, 256, (n, k // 32, BLOCK_BYTES[kind]), dtype=np.uint8)
    for column in (0, 2) if kind == "Q4_1" else (0,):
        halves = (rng.normal(size=(n, k // 32)) * 0.1).astype(np.float16)
        blocks[..., column : column + 2] = halves[..., None].view(np.uint8)
    rows = blocks.reshape(n, -1)
    return PackedLinear(kind, rows, k), reference.dequantize(kind, rows)  # type: ignore[arg-type]


def run(layer: PackedLinear, x: NDArray[np.float32], bits: int = 15) -> NDArray[np.float32]:
    out = np.full((len(x), layer.outputs + 3), 7.0, np.float32)
    layer.apply(x, out[:, : layer.outputs], activation_bits=bits)
    assert (out[:, layer.outputs :] == 7.0).all()
    return out[:, : layer.outputs]


def normal(m: int, k: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(m, k)).astype(np.float32)


def error(got: NDArray[np.float32], expected: NDArray[np.float64]) -> float:
    """Relative error in the Frobenius norm."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
