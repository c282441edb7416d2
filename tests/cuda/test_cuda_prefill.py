"""Paged prefill attention equals the numpy reference."""

import pytest
from tests.cuda.attention_case import Case
from tests.cuda.variants import VARIANTS

from tokring_kernels.cuda.launcher import EmulatedLauncher

pytestmark = pytest.mark.timeout(600)  # compilers on a busy machine
LENGTHS, QUERIES = [5, 200, 77, 16, 1, 130], [5, 130, 1, 16, 1, 3]


def test_prefill_equals_the_reference_in_every_thread_order(each_order: EmulatedLauncher) -> None:
    case = Case(lengths=LENGTHS, num_queries=QUERIES)
    case.check(case.prefill(each_order))


@pytest.mark.parametrize(("element", "head_dim", "kv_format"), VARIANTS)
def test_prefill_equals_the_reference_for_every_type_and_head_dim(
    forward: EmulatedLauncher, element: str, head_dim: int, kv_format: str
) -> None:
    case = Case(
        lengths=[70, 150], num_queries=[70, 40], element=element, head_dim=head_dim, kv_format=kv_format, num_heads=4
    )
    case.check(case.prefill(forward))


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (16, 2)], ids=lambda h: f"{h[0]}of{h[1]}")
def test_prefill_takes_any_group_of_heads(forward: EmulatedLauncher, heads: tuple[int, int]) -> None:
    case = Case(lengths=[100, 60], num_queries=[100, 5], num_heads=heads[0], num_kv_heads=heads[1])
    case.check(case.prefill(forward))


@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (17, 0.0), (64, 5.0), (0, 5.0)])
def test_prefill_with_sliding_window_and_soft_cap(forward: EmulatedLauncher, window: int, soft_cap: float) -> None:
    case = Case(lengths=[230, 90], num_queries=[100, 90], window=window, soft_cap=soft_cap, num_heads=2)
    case.check(case.prefill(forward))


def test_prefill_reads_no_block_before_the_window(forward: EmulatedLauncher) -> None:
    case = Case(lengths=[300], num_queries=[10], window=20, num_heads=2)
    expected = case.expected()
    case.block_table[0, : (290 + 1 - 20) // 16] = 2**30
    case.expected = lambda: expected  # type: ignore[method-assign]
    case.check(case.prefill(forward))
