"""The step's state on the device: scattered changes, decoding rows that advance by themselves."""

import numpy as np
import pytest
from tests.cuda.arrays import int32

from tokring_kernels.cuda.launcher import EmulatedLauncher
from tokring_kernels.cuda.ops import CudaOps


@pytest.fixture
def ops(launcher: EmulatedLauncher) -> CudaOps:
    return CudaOps(launcher)


@pytest.mark.parametrize("num_pairs", [0, 1, 3, 700, 30_000])
def test_scatter_writes_the_pairs_that_are_counted(ops: CudaOps, num_pairs: int) -> None:
    rng = np.random.default_rng(num_pairs)
    state = rng.integers(-(2**31), 2**31, 50_000).astype(np.int32)
    update = rng.integers(-(2**31), 2**31, 1 + 2 * (num_pairs + 40)).astype(np.int32)  # stale pairs behind
    update[0] = num_pairs
    update[1::2][:num_pairs] = rng.permutation(len(state))[:num_pairs]
    expected = state.copy()
    expected[update[1::2][:num_pairs]] = update[2::2][:num_pairs]
    ops.scatter_metadata(state, update)
    np.testing.assert_array_equal(state, expected)


def test_scatter_ignores_indices_outside_and_a_count_beyond_the_buffer(ops: CudaOps) -> None:
    state = int32(1, 2, 3)
    ops.scatter_metadata(state, int32(9, 3, 7, -1, 7, 2, 8))
    assert state.tolist() == [1, 2, 8]


def test_decode_rows_find_their_slot_and_advance(ops: CudaOps) -> None:
    """Rows: in a first block, at the end of one, at the start of the next, absent, beyond the table."""
    lengths = int32(1, 16, 17, 0, 33)
    table = int32(4, 9, 2, 8, 6, 3, 1, 5, 7, 0).reshape(5, 2)
    positions, slots, token_ids = np.full(5, 7, np.int32), np.full(5, 7, np.int32), int32(10, 11, 12, 13, 14)
    ops.begin_decode(slots, lengths, table, positions)
    assert positions.tolist() == [0, 15, 16, 0, 32]
    assert slots.tolist() == [64, 47, 48, -1, -1]
    ops.advance_decode(token_ids, lengths, int32(20, -1, 22, 23, 24))
    assert lengths.tolist() == [2, 17, 18, 0, 34]
    assert token_ids.tolist() == [20, 0, 22, 13, 24]


def test_many_rows(ops: CudaOps) -> None:
    rows = 300
    lengths = np.arange(rows, dtype=np.int32)
    table = np.arange(rows * 20, dtype=np.int32).reshape(rows, 20)
    positions, slots = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    ops.begin_decode(slots, lengths, table, positions)
    expected = [-1, *(int(table[r, (r - 1) // 16]) * 16 + (r - 1) % 16 for r in range(1, rows))]
    assert slots.tolist() == expected and positions.tolist() == [0, *range(rows - 1)]
