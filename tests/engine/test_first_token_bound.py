"""Short prompts beside prompts of context length: nobody's first token comes later than docs/scheduling.md says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.engine_harness import EngineHarness
from tests.support.fake_channel import Stream
from tokring.engine.mock_runner import MockRunner

BUDGET = 512
CONTEXT_LENGTH = 4096
NUM_SHORT = 200
NUM_LONG = 4
VOCAB_SIZE = 97


@dataclass
class Submitted:
    """One request of the load, by step numbers."""

    stream: Stream
    num_prompt: int
    step: int
    first_token_step: int = -1


def bound_in_steps(request: Submitted, everyone: list[Submitted]) -> int:
    """docs/scheduling.md: half of what decoding leaves of the budget goes in order, half by fewest tokens left."""
    half = (BUDGET - len(everyone)) // 2
    in_order = sum(other.num_prompt for other in everyone if other.step <= request.step)
    by_size = sum(other.num_prompt for other in everyone if other.num_prompt <= request.num_prompt)
    intake = -(-len(everyone) // 64)
    return intake + -(-min(in_order, by_size) // half) + 1


@pytest.mark.parametrize("long_ones_come", ["first", "in between"])
def test_no_first_token_is_later_than_the_bound_of_the_token_budget(long_ones_come):
    random = np.random.default_rng(1)
    harness = EngineHarness(
        MockRunner(VOCAB_SIZE, max_rows=NUM_SHORT + NUM_LONG),
        max_model_len=CONTEXT_LENGTH,
        num_blocks=NUM_LONG * CONTEXT_LENGTH // 16 + NUM_SHORT * 8 + 64,
        max_num_seqs=NUM_SHORT + NUM_LONG,
        max_num_batched_tokens=BUDGET,
    )
    sizes = random.integers(8, 64, NUM_SHORT).tolist()
    places = range(NUM_LONG) if long_ones_come == "first" else range(10, 10 + 50 * NUM_LONG, 50)
    for place in places:
        sizes.insert(place, CONTEXT_LENGTH - 1)
    requests: list[Submitted] = []
    step = 0
    while len(requests) < len(sizes) or harness.core.has_work:
        for size in sizes[len(requests) : len(requests) + (len(sizes) if long_ones_come == "first" else 3)]:
            ids = random.integers(0, VOCAB_SIZE, size)
            requests.append(Submitted(harness.submit(ids, max_tokens=32), size, step))
        step += 1
        harness.core.step()
        for request in requests:
            if request.first_token_step < 0 and request.stream.token_ids:
                request.first_token_step = step
    waited = [request.first_token_step - request.step for request in requests]
    bounds = [bound_in_steps(request, requests) for request in requests]
    assert all(steps <= bound for steps, bound in zip(waited, bounds, strict=True)), list(
        zip(waited, bounds, strict=True)
    )
    total = sum(sizes)
    longest_short = max(steps for steps, request in zip(waited, requests, strict=True) if request.num_prompt < 64)
    assert longest_short < total / BUDGET, "short prompts waited behind the long ones"
