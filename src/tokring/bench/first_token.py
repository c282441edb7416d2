"""Short prompts beside prompts of context length: when each first token came, and the latest moment that it may.

Real rings, scheduler, KV bookkeeping and sampling; the model takes as long for a step as its tokens are said to cost.
The bound is derived in docs/scheduling.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tokring.bench.step import connected, plain_record
from tokring.engine.core import EngineCore
from tokring.engine.engine_config import EngineConfig
from tokring.engine.mock_runner import MockRunner
from tokring_ipc import FrontEndChannel

BLOCK_SIZE = 16
VOCAB_SIZE = 97
SHORTEST, LONGEST_SHORT = 8, 63  # prompt tokens
INTAKE_PER_STEP = 64
ARRIVALS_PER_STEP = 3  # of the load that comes bit by bit

Arrival = Literal["first", "in between"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`num_long` prompts of context length: before all short ones, at once; or in between, a few requests a step."""

    long_ones_come: Arrival
    step_ms: float = 0.0  # of a step without prompts
    prefill_tokens_per_s: float = 0.0  # 0: prompts cost no time
    num_short: int = 200
    num_long: int = 4
    context_length: int = 4096
    budget: int = 512
    max_tokens: int = 32
    seed: int = 1

    @property
    def num_requests(self) -> int:
        """All of them: there is a seat for each."""
        return self.num_short + self.num_long

    def sizes(self) -> list[int]:
        """Prompt tokens by order of arrival."""
        random = np.random.default_rng(self.seed)
        sizes: list[int] = random.integers(SHORTEST, LONGEST_SHORT + 1, self.num_short).tolist()
        between = self.num_short // self.num_long
        for index in range(self.num_long):
            place = index if self.long_ones_come == "first" else between // 5 + index * between
            sizes.insert(place, self.context_length - 1)
        return sizes


@dataclass(slots=True)
class Served:
    """One request: its size, and how long it waited for its first token beside the longest that it may wait."""

    num_prompt: int
    came_at_step: int
    came_s: float
    first_token_step: int = -1
    first_token_s: float = 0.0
    bound_steps: int = 0

    @property
    def steps(self) -> int:
        """Steps from its arrival to its first token."""
        return self.first_token_step - self.came_at_step

    @property
    def seconds(self) -> float:
        """The same on the clock, as the front end sees it."""
        return self.first_token_s - self.came_s


@dataclass(slots=True)
class Outcome:
    """All requests in order of arrival, and the longest step: with it, steps become seconds."""

    requests: list[Served]
    longest_step_s: float

    @property
    def late(self) -> list[Served]:
        """Requests whose first token came later than the bound allows. There must be none."""
        return [request for request in self.requests if request.steps > request.bound_steps]

    def bound_s(self, request: Served) -> float:
        """The bound if every step were as long as the longest."""
        return request.bound_steps * self.longest_step_s


def bound_in_steps(request: Served, everyone: list[Served], budget: int) -> int:
    """docs/scheduling.md: half of what decoding leaves of the budget goes in order, half by fewest tokens left."""
    half = (budget - len(everyone)) // 2
    in_order = sum(other.num_prompt for other in everyone if other.came_at_step <= request.came_at_step)
    by_size = sum(min(other.num_prompt, request.num_prompt) for other in everyone)
    intake = -(-len(everyone) // INTAKE_PER_STEP)
    return intake + -(-min(in_order, by_size) // half) + 1


def measure(load: Load) -> Outcome:
    """Serve the whole load once."""
    config = EngineConfig(
        vocab_size=VOCAB_SIZE,
        max_model_len=load.context_length,
        num_blocks=load.num_long * load.context_length // BLOCK_SIZE + load.num_short * 8 + 64,
        block_size=BLOCK_SIZE,
        max_num_seqs=load.num_requests,
        max_num_batched_tokens=load.budget,
        max_intake_per_step=INTAKE_PER_STEP,
    )
    runner = MockRunner(
        VOCAB_SIZE,
        max_rows=load.num_requests,
        step_ms=load.step_ms,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
    )
    with connected() as (near, far):
        core = EngineCore(config, runner)
        core.attach(0, far)
        return _serve(load, near, core)


def _serve(load: Load, channel: FrontEndChannel, core: EngineCore) -> Outcome:
    random = np.random.default_rng(load.seed)
    sizes = load.sizes()
    requests: list[Served] = []
    step, longest_s = 0, 0.0
    while len(requests) < len(sizes) or core.has_work:
        more = len(sizes) if load.long_ones_come == "first" else ARRIVALS_PER_STEP
        for size in sizes[len(requests) : len(requests) + more]:
            ids = random.integers(0, VOCAB_SIZE, size, dtype=np.int32)
            if not channel.submit(plain_record(len(requests), 1, load.max_tokens), ids):
                raise RuntimeError("the request ring is too small for this load")
            requests.append(Served(size, step, time.monotonic()))
        started_s = time.monotonic()
        core.step()
        step += 1
        longest_s = max(longest_s, time.monotonic() - started_s)
        for slot in _slots_with_tokens(channel):
            if requests[slot].first_token_step < 0:
                requests[slot].first_token_step, requests[slot].first_token_s = step, time.monotonic()
    for request in requests:
        request.bound_steps = bound_in_steps(request, requests, load.budget)
    return Outcome(requests, longest_s)


def _slots_with_tokens(channel: FrontEndChannel) -> list[int]:
    slots: list[int] = []
    while (frame := channel.poll()) is not None:
        slots += frame.stream_slot.tolist()
        del frame  # its views would die in release()
    channel.release()
    return slots
