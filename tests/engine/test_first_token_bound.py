"""Short prompts beside prompts of context length: nobody's first token comes later than docs/scheduling.md says."""

from __future__ import annotations

import pytest

from tokring.bench.first_token import LONGEST_SHORT, Load, measure


@pytest.mark.parametrize("long_ones_come", ["first", "in between"])
def test_no_first_token_is_later_than_the_bound_of_the_token_budget(long_ones_come):
    load = Load(long_ones_come=long_ones_come)
    outcome = measure(load)
    assert len(outcome.requests) == load.num_requests and min(r.steps for r in outcome.requests) >= 1
    assert outcome.late == []
    short = [request for request in outcome.requests if request.num_prompt <= LONGEST_SHORT]
    assert len(short) == load.num_short
    assert max(r.steps for r in short) < sum(load.sizes()) / load.budget, "short prompts waited behind the long ones"
