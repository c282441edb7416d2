"""Embedding, norms and gated activations equal the numpy references."""

import numpy as np
import pytest
from tests.cuda.arrays import (
    ACTIVATIONS,
    RESIDUALS,
    UNWRITTEN,
    assert_near,
    int32,
    narrowed,
    normal,
    unwritten,
    widened,
)

from tokring_kernels import reference
from tokring_kernels.cuda.launcher import EmulatedLauncher
from tokring_kernels.cuda.ops import CudaOps


@pytest.fixture
def ops(launcher: EmulatedLauncher) -> CudaOps:
    return CudaOps(launcher)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("width", [8, 576, 1032])
def test_embed_takes_rows_and_scales_them(ops: CudaOps, act: str, width: int) -> None:
    table = normal(11, width, kind=act)
    out = unwritten(6, width, kind="f32")
    ops.embed(out, int32(10, 0, 3, 3, 11, -1), table, scale=3.5)
    expected = widened(table)[[10, 0, 3, 3, 0, 0]] * np.float32(3.5)
    expected[4:] = 0  # ids outside the vocabulary
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("residual_kind", RESIDUALS)
@pytest.mark.parametrize("width", [8, 576, 4096, 16_384])
def test_add_rms_norm_adds_the_branch_and_normalises(ops: CudaOps, residual_kind: str, width: int) -> None:
    residual, branch = normal(3, width, kind=residual_kind), normal(3, width, kind="bf16", seed=1)
    weight, out = normal(width, seed=2), unwritten(3, width, kind="bf16")
    total = widened(residual) + widened(branch)
    ops.add_rms_norm(out, residual, branch, weight, 1e-5, weight_offset=1.0)
    np.testing.assert_array_equal(residual, narrowed(total, residual_kind))
    assert_near(out, reference.rms_norm(total, weight + 1, 1e-5), "bf16")


@pytest.mark.parametrize("residual_kind", RESIDUALS)
def test_add_rms_norm_normalises_the_branch_first(ops: CudaOps, residual_kind: str) -> None:
    residual, branch = normal(2, 640, kind=residual_kind), normal(2, 640, kind="bf16", seed=1, scale=30)
    weight, branch_weight, out = normal(640, seed=2), normal(640, seed=3), unwritten(2, 640, kind="bf16")
    total = widened(residual) + reference.rms_norm(branch, branch_weight + 1, 1e-6)
    ops.add_rms_norm(out, residual, branch, weight, 1e-6, weight_offset=1.0, branch_weight=branch_weight)
    assert_near(residual, total, residual_kind)
    assert_near(out, reference.rms_norm(total, weight + 1, 1e-6), "bf16")


def test_add_rms_norm_of_chosen_rows_leaves_the_residual(ops: CudaOps) -> None:
    residual, branch = normal(5, 72), normal(5, 72, kind="bf16", seed=1)
    before, weight, out = residual.copy(), normal(72, seed=2), unwritten(4, 72, kind="bf16")
    ops.add_rms_norm(out, residual, branch, weight, 1e-5, rows=int32(4, -1, 0, 4))
    expected = reference.rms_norm(residual + widened(branch), weight, 1e-5)[[4, 0, 0, 4]]
    expected[1] = UNWRITTEN
    assert_near(out, expected, "bf16")
    np.testing.assert_array_equal(residual, before)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_rms_norm_only_reads_its_input(ops: CudaOps, act: str) -> None:
    x, weight, out = normal(70, 128), normal(128, seed=1), unwritten(70, 128, kind=act)
    before = x.copy()
    ops.rms_norm(out, x, weight, 1e-5)
    assert_near(out, reference.rms_norm(x, weight, 1e-5), act)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("width", [8, 1536, 2056])
def test_gated_activations(ops: CudaOps, act: str, width: int) -> None:
    gate_up = normal(3, 2 * width, kind=act, scale=4)
    gate_up[0, :4] = narrowed(np.array([-200, -90, 0, 200], np.float32), act)
    out = unwritten(3, width, kind=act)
    ops.silu_mul(out, gate_up)
    np.testing.assert_allclose(widened(out), reference.silu_mul(widened(gate_up)), rtol=2**-8, atol=1e-6)
    ops.gelu_tanh_mul(out, gate_up)
    np.testing.assert_allclose(widened(out), reference.gelu_tanh_mul(widened(gate_up)), rtol=2**-8, atol=1e-5)


def test_arguments_of_a_wrong_kind_are_named(ops: CudaOps) -> None:
    with pytest.raises(ValueError, match=r"gate_up must have shape \[2, 32\], but has \[2, 16\]"):
        ops.silu_mul(unwritten(2, 16, kind="bf16"), unwritten(2, 16, kind="bf16"))
    with pytest.raises(ValueError, match="weight must be f32, but is float64"):
        ops.rms_norm(unwritten(2, 16, kind="bf16"), normal(2, 16), np.ones(16), 1e-5)
    with pytest.raises(ValueError, match="out must be contiguous"):
        ops.silu_mul(unwritten(2, 32, kind="bf16")[:, ::2], unwritten(2, 32, kind="bf16"))
    with pytest.raises(ValueError, match="multiple of 8 up to 16384, but is 12"):
        ops.rms_norm(unwritten(2, 12, kind="bf16"), normal(2, 12), normal(12), 1e-5)
