"""Paged prefill attention by warpgroup products, the kernel for Hopper, equals the numpy reference."""

from itertools import product

import pytest
from tests.cuda.attention_case import Case
from tests.cuda.variants import LONG

from tokring_kernels.cuda.attention import WARPGROUP_HEAD_DIMS
from tokring_kernels.cuda.launcher import Launcher

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("hopper")]  # compilers on a busy machine

VARIANTS = list(product(("Bf16", "F16"), WARPGROUP_HEAD_DIMS)) if LONG else [("F16", 64), ("Bf16", 256)]


def test_it_equals_the_reference_in_every_thread_order(each_order: Launcher) -> None:
    case = Case(lengths=[5, 300, 77, 16, 1, 130], num_queries=[5, 230, 1, 16, 1, 3], head_dim=128)
    case.check(case.prefill(each_order, warpgroups=True))


@pytest.mark.parametrize(("element", "head_dim"), VARIANTS)
def test_it_equals_the_reference_for_every_type_and_head_dim(forward: Launcher, element: str, head_dim: int) -> None:
    case = Case(lengths=[70, 400], num_queries=[70, 140], element=element, head_dim=head_dim, num_heads=4)
    case.check(case.prefill(forward, warpgroups=True))


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (16, 2)], ids=lambda h: f"{h[0]}of{h[1]}")
def test_it_takes_any_group_of_heads(forward: Launcher, heads: tuple[int, int]) -> None:
    case = Case(lengths=[100, 60], num_queries=[100, 5], num_heads=heads[0], num_kv_heads=heads[1], head_dim=128)
    case.check(case.prefill(forward, warpgroups=True))


@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (17, 0.0), (128, 5.0), (0, 5.0)])
def test_it_knows_sliding_windows_and_soft_caps(forward: Launcher, window: int, soft_cap: float) -> None:
    options = {"window": window, "soft_cap": soft_cap}
    case = Case(lengths=[330, 90], num_queries=[100, 90], num_heads=2, head_dim=128, **options)  # type: ignore[arg-type]
    case.check(case.prefill(forward, warpgroups=True))


def test_it_reads_no_block_before_the_window_or_after_the_end(forward: Launcher) -> None:
    case = Case(lengths=[400, 128, 144], num_queries=[10, 20, 2], window=20, num_heads=2, head_dim=128)
    expected = case.expected()
    case.block_table[0, : (390 + 1 - 20) // 16] = 2**30
    case.expected = lambda: expected  # type: ignore[method-assign]
    case.check(case.prefill(forward, warpgroups=True))
