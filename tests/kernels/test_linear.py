"""Linear layers on packed weights: right against numpy, and a row's bits its own."""

import numpy as np
import pytest
from tests.kernels.packed_layers import BLOCK_BYTES, KINDS, error, make, normal, run

import tokring_kernels
from tokring_kernels import PackedLinear, reference


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (1, 64), (37, 96), (160, 576)])
@pytest.mark.parametrize("m", [1, 3, 8, 21])
def test_a_layer_equals_the_reference(level: str, kind: str, n: int, k: int, m: int) -> None:
    layer, weight = make(kind, n, k)
    x = normal(m, k)
    forms = {"F32": lambda: x, "BF16": lambda: reference.as_f32(reference.narrow(x))}
    rounded = forms.get(kind, lambda: reference.quantize(x, 15))()
    assert error(run(layer, x), reference.linear(weight, rounded)) < 1e-6


@pytest.mark.parametrize("kind", list(BLOCK_BYTES))
@pytest.mark.parametrize(("bits", "limit"), [(15, 1e-4), (8, 1e-2)])
def test_the_price_of_integer_activations_is_as_stated(level: str, kind: str, bits: int, limit: float) -> None:
    layer, weight = make(kind, 160, 576)
    x = normal(4, 576)
    exact = reference.linear(weight, x)
    assert error(run(layer, x, bits), exact) < limit
    assert error(run(layer, x, bits), reference.linear(weight, reference.quantize(x, bits))) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 15])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(level: str, threads: int, kind: str, bits: int) -> None:
    layer, _ = make(kind, 200, 96)
    x = normal(19, 96)
    together = run(layer, x, bits)
    for row in range(19):
        assert np.array_equal(run(layer, x[row : row + 1], bits)[0], together[row])


def test_float32_takes_any_number_of_inputs(level: str) -> None:
    layer, weight = make("F32", 33, 7)
    x = normal(9, 7)
    assert error(run(layer, x), reference.linear(weight, x)) < 1e-6


@pytest.mark.parametrize("kind", ["F32", *BLOCK_BYTES])
def test_layers_but_bfloat16_have_the_same_bits_on_every_level_with_fma(kind: str) -> None:
    layer, _ = make(kind, 64, 576)
    x = normal(5, 576)
    before = tokring_kernels.level()
    results = []
    for name in tokring_kernels.supported_levels()[1:]:
        tokring_kernels.set_level(name)
        results.append(run(layer, x))
    tokring_kernels.set_level(before)
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_tiny_and_huge_activations_are_taken(level: str, kind: str) -> None:
    layer, weight = make(kind, 16, 64)
    x = normal(4, 64) * np.array([[0.0], [1e-36], [1e30], [1.0]], np.float32)
    out = run(layer, x)
    assert not out[0].any()
    assert np.abs(out[1]).max() < 1e-30
    np.testing.assert_allclose(out[2:], reference.linear(weight, x)[2:], rtol=0.05, atol=np.abs(out[3]).max() * 0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_activations_spoil_their_own_row_only(level: str, kind: str, poison: float) -> None:
    layer, _ = make(kind, 16, 64)
    x = normal(3, 64)
    expected = run(layer, x)
    x[1, 40] = poison
    out = run(layer, x)
    assert not np.isfinite(out[1]).any()
    assert np.array_equal(out[[0, 2]], expected[[0, 2]])


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows must be uint8\[\*, 40\], but is uint8\[2, 36\]"):
        PackedLinear("Q4_1", np.zeros((2, 36), np.uint8), 64)
    with pytest.raises(ValueError, match="k must be a multiple of 32, but is 40"):
        PackedLinear("BF16", np.zeros((2, 40), np.uint16), 40)
    with pytest.raises(ValueError, match="unknown weight kind 'Q5_K'"):
        PackedLinear("Q5_K", np.zeros((2, 40), np.uint8), 40)  # type: ignore[arg-type]
