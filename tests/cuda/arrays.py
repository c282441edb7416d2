"""Arrays for tests of CUDA ops: numpy, bfloat16 as its bits in uint16."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.cuda.variants import LONG

from tokring_kernels import reference

F32 = NDArray[np.float32]
# The short form leaves out what differs in a type only: each variant is compiled.
ACTIVATIONS = ("bf16", "f16") if LONG else ("bf16",)
RESIDUALS = ("f32", "bf16") if LONG else ("f32",)
QUANTIZED = ("fp8", "int8") if LONG else ("fp8",)
# One rounding of the dtype; what is computed in float is far nearer.
TOLERANCE = {"bf16": 2**-8, "f16": 2**-11, "f32": 1e-5}
UNWRITTEN = 7.25  # exact in every dtype


def narrowed(x: NDArray[Any], kind: str) -> NDArray[Any]:
    x = np.ascontiguousarray(x, np.float32)
    return reference.narrow(x) if kind == "bf16" else x.astype(np.float16) if kind == "f16" else x


def widened(x: NDArray[Any]) -> F32:
    return reference.widen(x) if x.dtype == np.uint16 else x.astype(np.float32)


def normal(*shape: int, kind: str = "f32", seed: int = 0, scale: float = 1.0) -> NDArray[Any]:
    return narrowed(np.random.default_rng([seed, *shape]).normal(size=shape) * scale, kind)


def unwritten(*shape: int, kind: str = "f32") -> NDArray[Any]:
    return narrowed(np.full(shape, UNWRITTEN), kind)


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def assert_near(found: NDArray[Any], expected: NDArray[Any], kind: str) -> None:
    np.testing.assert_allclose(widened(found), expected, rtol=TOLERANCE[kind], atol=TOLERANCE[kind] * 1e-2)
