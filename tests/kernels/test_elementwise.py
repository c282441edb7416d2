"""RMSNorm, RoPE and SiLU * mul against numpy, for any width and both float types."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tokring_kernels
from tokring_kernels import reference

any_shape = given(rows=st.integers(1, 20), width=st.integers(1, 70), seed=st.integers(0, 50))
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=shape) * 4).astype(np.float32)


@quick
@any_shape
def test_rms_norm_equals_the_reference(level: str, rows: int, width: int, seed: int) -> None:
    x, weight, out = normal(seed, rows, width), normal(seed + 1, width), np.zeros((rows, width), np.float32)
    tokring_kernels.rms_norm(x, weight, 1e-5, out)
    np.testing.assert_allclose(out, reference.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-6)


@quick
@any_shape
def test_silu_mul_equals_the_reference(level: str, rows: int, width: int, seed: int) -> None:
    gate_up, out = normal(seed, rows, 2 * width), np.zeros((rows, width), np.float32)
    gate_up[0, 0] = -200.0
    tokring_kernels.silu_mul(gate_up, out)
    np.testing.assert_allclose(out, reference.silu_mul(gate_up), rtol=1e-6, atol=1e-6)


@quick
@any_shape
def test_bfloat16_rows_are_computed_in_float32_and_rounded_once(level: str, rows: int, width: int, seed: int) -> None:
    x = reference.narrow(normal(seed, rows, 2 * width))
    weight = normal(seed + 1, 2 * width)
    for kernel, columns in (
        (lambda a, out: tokring_kernels.rms_norm(a, weight, 1e-6, out), 2 * width),
        (tokring_kernels.silu_mul, width),
    ):
        narrow, wide = np.zeros((rows, columns), np.uint16), np.zeros((rows, columns), np.float32)
        kernel(x, narrow)
        kernel(reference.widen(x), wide)
        assert np.array_equal(narrow, reference.narrow(wide))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (24, 24)])
def test_rope_equals_the_reference(level: str, bf16: bool, head_dim: int, rotary_dim: int) -> None:
    angles = np.arange(50)[:, None] * (10_000.0 ** -(np.arange(rotary_dim // 2) * 2 / rotary_dim))
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = np.array([0, 49, 7, 7], np.int32)
    fused = normal(3, 4, 5, head_dim)
    x = (reference.narrow(fused) if bf16 else fused.copy())[:, 1:4]  # a slice of fused projections
    expected = reference.rope(x, cosine, sine, positions)
    tokring_kernels.rope(x, cosine, sine, positions)
    assert np.array_equal(x, reference.narrow(expected) if bf16 else expected)


def test_rope_refuses_a_position_beyond_its_tables() -> None:
    table = np.zeros((10, 4), np.float32)
    with pytest.raises(ValueError, match=r"positions\[0\] is 10, beyond the tables' 10 rows"):
        tokring_kernels.rope(np.zeros((1, 1, 8), np.float32), table, table, np.array([10], np.int64))


def test_torch_tensors_are_taken_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 48).to(torch.bfloat16)
    out = torch.zeros(4, 48, dtype=torch.bfloat16)
    weight = torch.ones(48)
    tokring_kernels.rms_norm(x, weight, 1e-6, out)
    expected = torch.nn.functional.rms_norm(x.float(), (48,), weight, 1e-6)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("count", [0, 1, 131_072, 300_001])
def test_words_are_read_once_each(threads: int, count: int) -> None:
    words = np.random.default_rng(count).integers(-(2**62), 2**62, count)
    assert tokring_kernels.xor_words(words) == np.bitwise_xor.reduce(words)
