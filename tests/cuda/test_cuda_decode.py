"""Paged decode attention equals the numpy reference."""

import numpy as np
import pytest
from tests.cuda.attention_case import Case
from tests.cuda.variants import VARIANTS

from tokring_kernels.cuda.launcher import EmulatedLauncher

pytestmark = pytest.mark.timeout(600)  # compilers on a busy machine
LENGTHS = [1, 15, 16, 17, 300, 0, 200]


@pytest.mark.parametrize("num_multiprocessors", [1, 8], ids=["whole", "split"])
def test_decode_equals_the_reference_in_every_thread_order(
    each_order: EmulatedLauncher, num_multiprocessors: int
) -> None:
    case = Case(lengths=LENGTHS, num_queries=[1] * len(LENGTHS))
    case.check(case.decode(each_order, num_multiprocessors))


@pytest.mark.parametrize(("element", "head_dim", "kv_format"), VARIANTS)
def test_decode_equals_the_reference_for_every_type_and_head_dim(
    forward: EmulatedLauncher, element: str, head_dim: int, kv_format: str
) -> None:
    lengths = [1, 33, 600]
    case = Case(lengths=lengths, num_queries=[1] * 3, element=element, head_dim=head_dim, kv_format=kv_format)
    case.check(case.decode(forward, 4))


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (16, 2), (12, 1), (40, 2)], ids=lambda h: f"{h[0]}of{h[1]}")
def test_decode_takes_any_group_of_heads(forward: EmulatedLauncher, heads: tuple[int, int]) -> None:
    case = Case(lengths=[100, 260], num_queries=[1, 1], num_heads=heads[0], num_kv_heads=heads[1])
    case.check(case.decode(forward, 2))


@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (17, 0.0), (64, 5.0), (1000, 0.0), (0, 5.0)])
def test_decode_with_sliding_window_and_soft_cap(forward: EmulatedLauncher, window: int, soft_cap: float) -> None:
    case = Case(lengths=LENGTHS, num_queries=[1] * len(LENGTHS), window=window, soft_cap=soft_cap)
    case.check(case.decode(forward, 8))


def test_blocks_before_the_window_are_not_read(forward: EmulatedLauncher) -> None:
    case = Case(lengths=[300], num_queries=[1], window=20)
    expected = case.expected()
    case.block_table[0, : (300 - 20) // 16] = 2**30
    case.expected = lambda: expected  # type: ignore[method-assign]
    case.check(case.decode(forward, 8))


def test_decode_of_many_rows_gives_each_its_own_share(forward: EmulatedLauncher) -> None:
    lengths = list(np.random.default_rng(3).integers(0, 90, 70))
    case = Case(lengths=lengths, num_queries=[1] * 70, num_heads=2, num_kv_heads=1)
    case.check(case.decode(forward, 2))


def test_a_row_alone_or_among_others_is_the_same_sequence(forward: EmulatedLauncher) -> None:
    """Shares depend on the whole batch, results only by rounding."""
    case = Case(lengths=[900, 16, 16], num_queries=[1] * 3)
    together = case.decode(forward, 1)
    case.check(together)
    case.check(case.decode(forward, 64))
