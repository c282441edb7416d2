"""The AMX kernels on emulated tiles: right, and with quantized weights the same bits as without AMX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.kernels.packed_layers import BLOCK_BYTES, error, make, normal, run

import tokring_kernels
from tokring_kernels import reference


@contextmanager
def level(name: str) -> Iterator[None]:
    before = tokring_kernels.level()
    tokring_kernels.set_level(name)
    yield
    tokring_kernels.set_level(before)


@pytest.mark.skipif("avx2" not in tokring_kernels.supported_levels(), reason="the other levels' bits need an FMA")
@pytest.mark.parametrize("kind", list(BLOCK_BYTES))
@pytest.mark.parametrize("bits", [8, 15])
def test_quantized_layers_have_the_bits_they_have_without_amx(kind: str, bits: int) -> None:
    layer, _ = make(kind, 69, 96)
    for m in (1, 15, 16, 17, 32, 41):
        x = normal(m, 96)
        expected = run(layer, x, bits)
        with level("amx_emulated"):
            assert np.array_equal(run(layer, x, bits), expected)


@pytest.mark.parametrize(("n", "k"), [(16, 32), (37, 96), (160, 64)])
@pytest.mark.parametrize("m", [1, 16, 21, 32, 50])
def test_bfloat16_layers_equal_the_reference(n: int, k: int, m: int) -> None:
    layer, weight = make("BF16", n, k)
    x = normal(m, k)
    with level("amx_emulated"):
        out = run(layer, x)
    assert error(out, reference.linear(weight, reference.as_f32(reference.narrow(x)))) < 1e-6


def test_a_bfloat16_row_has_the_same_bits_alone_and_in_any_batch(threads: int) -> None:
    layer, _ = make("BF16", 200, 96)
    x = normal(37, 96)
    with level("amx_emulated"):
        together = run(layer, x)
        assert all(np.array_equal(run(layer, x[row : row + 1])[0], together[row]) for row in range(37))
        assert np.array_equal(run(layer, x[3:21]), together[3:21])


def test_a_nan_stays_in_its_row() -> None:
    layer, _ = make("Q4_1", 16, 64)
    x = normal(20, 64)
    with level("amx_emulated"):
        expected = run(layer, x)
        x[17, 3] = np.nan
        out = run(layer, x)
    assert np.isnan(out[17]).all()
    assert np.array_equal(np.delete(out, 17, axis=0), np.delete(expected, 17, axis=0))
