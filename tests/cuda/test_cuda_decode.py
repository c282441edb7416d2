"""Paged decode attention equals the numpy reference."""

import pytest
from tests.cuda.attention_case import Case

from tokring_kernels.cuda.launcher import EmulatedLauncher

LENGTHS = [1, 15, 16, 17, 300, 0, 200]


@pytest.mark.parametrize("num_multiprocessors", [1, 8], ids=["whole", "split"])
def test_decode_equals_the_reference_in_every_thread_order(
    launcher: EmulatedLauncher, num_multiprocessors: int
) -> None:
    case = Case(lengths=LENGTHS, num_queries=[1] * len(LENGTHS))
    case.check(case.decode(launcher, num_multiprocessors))
