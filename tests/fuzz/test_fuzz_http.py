"""A short run of the HTTP fuzzer with cases that are always the same; `make fuzz-http` is the long form."""

from tests.fuzz.fuzz_http import fuzz

NUM_CASES = 250


def test_random_requests_are_answered_or_refused_and_harm_no_other() -> None:
    fuzzer = fuzz(seed=1, num_cases=NUM_CASES)
    assert fuzzer.num_cases == NUM_CASES
    assert fuzzer.num_canaries and fuzzer.statuses[200] and fuzzer.statuses[400]
