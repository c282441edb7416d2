"""Short prompts beside prompts of context length: nobody's first token comes later than docs/scheduling.md says."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.engine_harness import EngineHarness
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


@pytest.mark.parametrize("seed", range(20))
def test_no_random_arrivals_make_a_first_token_later_than_the_bound(seed):
    """Of prompts of one token of output each, so that nothing decodes; some sizes make the halves meet in odd ways."""
    random = np.random.default_rng(seed)
    budget = int(random.choice([8, 16, 32]))
    half = budget // 2
    harness = EngineHarness(
        max_num_batched_tokens=budget,
        num_blocks=4000,
        max_queued=1000,
        enable_prefix_caching=False,
        scheduling_policy="priority" if seed % 2 else "fcfs",
    )
    longest_usual = (half, budget, 2 * budget, 120)[seed % 4]
    requests = []  # (step of arrival, tokens, place in scheduling order, stream)
    done = {}
    for step in range(2000):
        for _ in range(int(random.integers(0, 3)) if step < 60 else 0):
            num_prompt = int(
                random.integers(1, longest_usual + 1) if random.random() < 0.8 else random.integers(50, 200)
            )
            priority = int(random.integers(-1, 2)) * (seed % 2)
            stream = harness.submit([1] * num_prompt, max_tokens=1, priority=priority)
            requests.append((step, num_prompt, (priority, len(requests)), stream))
        harness.core.step()
        done |= {order: step for *_, order, stream in requests if stream.finish is not None and order not in done}
    assert len(done) == len(requests)
    for came, num_prompt, order, _ in requests:
        beside = [r for r in requests if r[0] <= done[order] and done[r[2]] >= came]
        in_order = sum(tokens for _, tokens, other, _ in beside if other <= order)
        by_size = sum(min(tokens, num_prompt) for _, tokens, *_ in beside)
        assert done[order] - came + 1 <= 1 + -(-min(in_order, by_size) // half) + 1
