"""Paged prefill attention equals the numpy reference."""

from tests.cuda.attention_case import Case

from tokring_kernels.cuda.launcher import EmulatedLauncher

LENGTHS, QUERIES = [5, 200, 77, 16, 1, 130], [5, 130, 1, 16, 1, 3]


def test_prefill_equals_the_reference_in_every_thread_order(launcher: EmulatedLauncher) -> None:
    case = Case(lengths=LENGTHS, num_queries=QUERIES)
    case.check(case.prefill(launcher))
