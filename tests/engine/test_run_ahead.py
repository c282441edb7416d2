"""Steps that run ahead on an asynchronous backend: the same tokens, a surplus token at most, and really ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.engine_harness import EngineHarness
from tests.support.fake_channel import Stream
from tests.support.toy_runner import ToyRunner
from tokring.engine.model_runner import StepOutput
from tokring.engine.special_draw import SpecialDraw
from tokring.engine.step_batch import DrawColumns, StepBatch
from tokring.engine.threaded_runner import ThreadedRunner
from tokring_ipc import ErrorCode, ExtensionKind, FinishReason

VOCAB_SIZE = 97


class NotingRunner(ThreadedRunner):
    """Notes the order of launches and collections."""

    def __init__(self) -> None:
        super().__init__(ToyRunner(VOCAB_SIZE, block_size=8))
        self.events: list[str] = []
        self.num_launched = self.num_collected = 0

    def launch(
        self,
        batch: StepBatch,
        columns: DrawColumns | None,
        wanted_logits: NDArray[np.int32],
        special: SpecialDraw | None = None,
    ) -> Any:
        self.num_launched += 1
        self.events.append(f"launch {self.num_launched}" + ("" if columns is None else " ahead"))
        return super().launch(batch, columns, wanted_logits, special)

    def collect(self, handle: Any) -> StepOutput:
        self.num_collected += 1
        self.events.append(f"collect {self.num_collected}")
        return super().collect(handle)


def harness_with(runner: Any, **config: Any) -> EngineHarness:
    defaults = {"block_size": 8, "max_model_len": 96, "num_blocks": 200, "max_num_seqs": 16}
    return EngineHarness(runner, **(defaults | config))


def surplus(harness: EngineHarness) -> int:
    return harness.core.scheduler.num_surplus


def random_requests(harness: EngineHarness, *, plain: bool) -> list[Stream]:
    """Requests of many kinds; `plain`: only such as the runner can draw for."""
    random = np.random.default_rng(1)
    streams = []
    for i in range(40):
        shared = [1] * int(random.integers(0, 30))
        prompt = shared + random.integers(0, VOCAB_SIZE, random.integers(1, 30)).tolist()
        fields: dict[str, Any] = {"max_tokens": int(random.integers(1, 30)), "seed": i, "priority": i % 3}
        if i % 2:
            fields |= {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
        if i % 3 == 0:
            fields["stop_ids"] = random.integers(0, VOCAB_SIZE, 8).tolist()
        if i % 5 == 0:
            fields["num_logprobs"] = i % 4
        if i % 7 == 3 and not plain:
            fields |= {"repetition_penalty": 1.3, "extensions": [(ExtensionKind.CACHE_SALT, b"other")]}
        if i % 11 == 4 and not plain:
            fields["num_prompt_logprobs"] = 1
        if i % 4 == 3 and streams:
            fields["parent_slot"] = streams[-1].stream_slot
        streams.append(harness.channels[i % len(harness.channels)].submit(prompt, **fields))
    return streams


def outcome(stream: Stream) -> tuple[Any, ...]:
    """What its client is told; without the padding of logprobs to those of neighbours."""
    asked_for = [(rank, logprob, [i for i in top if i >= 0]) for rank, logprob, top, _ in stream.logprobs]
    return stream.token_ids, asked_for, stream.prompt_logprobs, stream.reason, int(stream.finish["num_output_tokens"])


@pytest.mark.parametrize("plain", [True, False], ids=["plain requests", "rules among them"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_seqs": 5, "max_num_batched_tokens": 19, "num_channels": 3, "scheduling_policy": "priority"},
        {"num_blocks": 14},
        {"num_blocks": 14, "max_num_batched_tokens": 23, "enable_prefix_caching": False},
    ],
    ids=["all at once", "small chunks, three front ends", "preempted", "preempted, no prefix cache"],
)
def test_running_ahead_changes_no_token_and_no_logprob(config, plain):
    outcomes = []
    for runner, ahead in (
        (ToyRunner(VOCAB_SIZE, block_size=8), True),
        (NotingRunner(), True),
        (NotingRunner(), False),
    ):
        harness = harness_with(runner, async_scheduling=ahead, **config)
        streams = random_requests(harness, plain=plain)
        harness.run()
        harness.check_nothing_left()
        assert "num_blocks" not in config or harness.core.scheduler.num_preemptions > 0
        outcomes.append([outcome(stream) for stream in streams])
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_step_is_launched_before_the_one_before_it_is_collected():
    runner = NotingRunner()
    harness = harness_with(runner)
    harness.generate([5, 6, 7], max_tokens=3)
    assert runner.events == [
        "launch 1 ahead",
        "launch 2 ahead",
        "collect 1",
        "launch 3 ahead",
        "collect 2",
        "collect 3",  # the length is known beforehand: no fourth step
    ]
    assert surplus(harness) == 0


@pytest.mark.parametrize(
    "fields, config",
    [({}, {"async_scheduling": False}), ({"repetition_penalty": 1.1}, {}), ({}, {"num_speculative_tokens": 2})],
    ids=["switched off", "penalties", "speculation"],
)
def test_steps_wait_for_each_other_where_the_next_one_needs_the_tokens(fields, config):
    runner = NotingRunner()
    harness_with(runner, **config).generate([5, 6, 7], max_tokens=3, **fields)
    launches = [event for event in runner.events if event.startswith("launch")]
    assert len(launches) >= 1 and not any("ahead" in event for event in launches)
    assert runner.events[::2] == launches


def test_a_token_behind_a_stop_id_is_surplus_never_sent_and_counted():
    harness = harness_with(NotingRunner())
    prompts = [[i, i + 1, i + 2] for i in range(10)]
    expected = [harness.generate(prompt, max_tokens=12) for prompt in prompts]
    assert surplus(harness) == 0
    streams = [
        harness.submit(prompt, max_tokens=12, stop_ids=[tokens[6]])
        for prompt, tokens in zip(prompts, expected, strict=True)
    ]
    harness.run()
    for stream, tokens in zip(streams, expected, strict=True):
        stopped = tokens[: tokens.index(tokens[6]) + 1]
        assert stream.token_ids == stopped and stream.reason == FinishReason.STOP
        assert int(stream.finish["num_output_tokens"]) == len(stopped)
    assert surplus(harness) == len(streams)
    harness.check_nothing_left()


class RulesRunner(NotingRunner):
    """Says that it draws by rules; for requests that have none to draw by."""

    draws_by_rules = True


def test_a_token_behind_a_further_stop_id_is_not_billed_either():
    harness = harness_with(RulesRunner())
    expected = harness.generate([3, 4, 5], max_tokens=12)
    stopped = expected[: expected.index(expected[6]) + 1]
    stream = harness.submit(
        [3, 4, 5], max_tokens=12, extensions=[(ExtensionKind.STOP_IDS, np.int32(expected[6]).tobytes())]
    )
    harness.run()
    assert stream.token_ids == stopped and stream.reason == FinishReason.STOP
    assert int(stream.finish["num_output_tokens"]) == len(stopped)
    assert surplus(harness) == 1
    harness.check_nothing_left()


def test_a_cancelled_request_costs_at_most_one_token_which_is_not_billed():
    harness = harness_with(NotingRunner())
    streams = [harness.submit([i, 3], max_tokens=50) for i in range(6)]
    for _ in range(5):
        harness.core.step()
    sent = [len(stream.token_ids) for stream in streams]
    for stream in streams[:3]:
        harness.channel.cancel(stream)
    harness.core.step()
    for stream, num_tokens in zip(streams[:3], sent, strict=False):
        assert stream.reason == FinishReason.ABORT
        assert len(stream.token_ids) == int(stream.finish["num_output_tokens"]) == num_tokens
    assert surplus(harness) == 3
    harness.run()
    assert all(stream.reason == FinishReason.LENGTH for stream in streams[3:])
    harness.check_nothing_left()


@pytest.mark.parametrize("leaving", [{1, 3}, {0, 3}, {1, 2, 4}, {0, 2, 3}, {0, 1, 2, 3, 4}], ids=str)
def test_tokens_reach_their_own_streams_when_several_left_while_a_step_was_in_flight(leaving):
    """Rows move into the places of those that leave: in whatever order they are then, each keeps its tokens."""
    harness = harness_with(NotingRunner())
    prompts = [[i, i + 1, i + 2] for i in range(6)]
    expected = [harness.generate(prompt, max_tokens=9) for prompt in prompts]
    streams = [harness.submit(prompt, max_tokens=9) for prompt in prompts]
    for _ in range(4):
        harness.core.step()
    for i in leaving:
        harness.channel.cancel(streams[i])
    harness.run()
    for i, (stream, tokens) in enumerate(zip(streams, expected, strict=True)):
        assert stream.token_ids == (tokens[: len(stream.token_ids)] if i in leaving else tokens)
    assert surplus(harness) == len(leaving)
    harness.check_nothing_left()


def test_logits_that_are_not_finite_end_one_request_and_its_neighbours_go_on():
    inner = ToyRunner(VOCAB_SIZE, block_size=8)
    harness = harness_with(ThreadedRunner(inner))
    expected = [harness.generate([i, 3], max_tokens=9) for i in range(4)]
    inner.nan_after_token = expected[2][4]
    streams = [harness.submit([i, 3], max_tokens=9) for i in range(4)]
    harness.run()
    assert ErrorCode(int(streams[2].finish["error_code"])) == ErrorCode.NOT_FINITE
    assert streams[2].token_ids == expected[2][:5][: len(streams[2].token_ids)]
    for i in (0, 1, 3):
        if inner.nan_after_token not in expected[i][:-1]:
            assert streams[i].token_ids == expected[i] and streams[i].reason == FinishReason.LENGTH
    harness.check_nothing_left()


def test_a_pause_and_the_end_of_a_front_end_let_no_step_hang_in_flight():
    runner = NotingRunner()
    harness = harness_with(runner, num_channels=2)
    streams = [channel.submit([9, 8], max_tokens=30) for channel in harness.channels]
    for _ in range(4):
        harness.core.step()
    harness.core.pause()
    harness.core.step()
    assert runner.num_collected == runner.num_launched
    assert not harness.core.step()
    harness.core.resume()
    harness.core.step()
    harness.core.detach(1)
    harness.run()
    assert streams[0].reason == FinishReason.LENGTH and streams[1].finish is None
    assert runner.num_collected == runner.num_launched
    harness.check_nothing_left()
