"""Random requests that join, leave and are preempted on backends of every kind: each gets what it gets alone."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from tests.support.engine_harness import EngineHarness
from tests.support.fake_channel import FakeChannel, Stream
from tests.support.rules_runner import RulesRunner
from tests.support.toy_runner import ToyRunner
from tokring.engine.threaded_runner import ThreadedRunner
from tokring_ipc import ExtensionKind, FinishReason

VOCAB_SIZE = 97
NUM_REQUESTS = 40
SIZES = {"block_size": 8, "max_model_len": 96}


def random_request(random: np.random.Generator) -> tuple[list[int], dict[str, Any]]:
    """Prompts often begin alike; of what a request can ask for each a few times."""
    prompt = [1] * int(random.integers(0, 30)) + random.integers(0, VOCAB_SIZE, random.integers(1, 30)).tolist()
    max_tokens = int(random.integers(0, 25))
    fields: dict[str, Any] = {"max_tokens": max_tokens, "seed": int(random.integers(1 << 30))}
    fields["priority"] = int(random.integers(-1, 2))
    if random.random() < 0.6:
        fields |= {"temperature": 0.9, "top_p": 0.9, "top_k": int(random.integers(0, 20)), "min_p": 0.01}
    if random.random() < 0.2:
        fields["stop_ids"] = random.integers(0, VOCAB_SIZE, 8).tolist()
    if random.random() < 0.3:
        fields["num_logprobs"] = int(random.integers(0, 6))
    if random.random() < 0.15:
        fields |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.2}
    if random.random() < 0.1:
        fields["min_tokens"] = int(random.integers(0, max_tokens + 1))
    if random.random() < 0.08:
        fields["num_prompt_logprobs"] = int(random.integers(0, 3))
    ids = random.integers(0, VOCAB_SIZE, 30).astype(np.int32)
    possible = [
        (ExtensionKind.STOP_IDS, ids.tobytes()),
        (ExtensionKind.LOGIT_BIAS, ids[:3].tobytes() + np.full(3, 2, np.float32).tobytes()),
        (ExtensionKind.ALLOWED_IDS, np.arange(50, dtype=np.int32).tobytes()),
        (ExtensionKind.BAD_WORDS, struct.pack("<3I", 2, 1, 2) + ids[:3].tobytes()),
        (ExtensionKind.CACHE_SALT, b"tenant"),
        (ExtensionKind.LOGPROB_IDS, ids[:3].tobytes()),
    ]
    fields["extensions"] = [item for item in possible if random.random() < 0.1]
    return prompt, fields


def outcome(stream: Stream, number: Any = float) -> tuple[Any, ...]:
    """What its client is told; without the padding of logprobs to those of neighbours."""
    logprobs = [
        (rank, logprob, [(i, number(value)) for i, value in zip(ids, values, strict=True) if i >= 0])
        for rank, logprob, ids, values in stream.logprobs
    ]
    assert stream.finish is not None
    numbers = [int(stream.finish[name]) for name in ("num_output_tokens", "error_code", "stop_id")]
    return stream.token_ids, logprobs, repr(stream.prompt_logprobs), stream.reason, numbers


def nearly(value: float) -> Any:
    """Equal to it but for rounding."""
    return pytest.approx(value, abs=1e-4)


class RandomRun:
    """Submits requests over three front ends, cancels some, and disturbs the engine meanwhile."""

    def __init__(self, harness: EngineHarness, random: np.random.Generator) -> None:
        self.harness = harness
        self.random = random
        self.streams: list[tuple[FakeChannel, Stream]] = []
        self.cancelled: set[int] = set()

    def run(self, requests: list[tuple[list[int], dict[str, Any]]]) -> None:
        """Serve them all; the block tables are checked after each step."""
        core, channels, random = self.harness.core, self.harness.channels, self.random
        waiting = list(requests)
        while waiting or core.has_work or any(channel._requests for channel in channels):
            for _ in range(min(random.integers(0, 12) if random.random() < 0.3 else 0, len(waiting))):
                self.submit(*waiting.pop(0))
            if self.streams and random.random() < 0.15:
                for _ in range(random.integers(1, 6)):  # several leave between two steps
                    self.cancel(int(random.integers(max(0, len(self.streams) - 12), len(self.streams))))
            if random.random() < 0.02:
                core.reset_prefix_cache()
            if random.random() < 0.05:
                channels[random.integers(3)].full ^= True
            if random.random() < 0.02:
                (core.resume if core.is_paused else core.pause)()
            if not waiting:
                core.resume()
                for channel in channels:
                    channel.full = False
            core.step()
            self.harness.check_consistent()

    def submit(self, prompt: list[int], fields: dict[str, Any]) -> None:
        channel = self.harness.channels[self.random.integers(3)]
        siblings = [stream for of, stream in self.streams if of is channel and stream.finish is None]
        if siblings and self.random.random() < 0.3:
            fields = fields | {"parent_slot": siblings[-1].stream_slot}
        self.streams.append((channel, channel.submit(prompt, **fields)))

    def cancel(self, index: int) -> None:
        channel, stream = self.streams[index]
        if stream.finish is None:
            channel.cancel(stream)
            self.cancelled.add(index)


@pytest.mark.parametrize("seed", range(12))
def test_every_request_gets_what_it_gets_alone(seed):
    random = np.random.default_rng(seed)
    requests = [random_request(random) for _ in range(NUM_REQUESTS)]
    nan_after_token = int(random.integers(VOCAB_SIZE)) if seed % 3 == 0 else -1
    alone = EngineHarness(ToyRunner(VOCAB_SIZE, 8), num_blocks=100, enable_prefix_caching=False, **SIZES)
    alone.runner.nan_after_token = nan_after_token
    expected = []
    for prompt, fields in requests:
        expected.append(alone.submit(prompt, **fields))
        alone.run()
    toy = ToyRunner(VOCAB_SIZE, 8)
    toy.nan_after_token = nan_after_token
    runner: Any = (RulesRunner, ThreadedRunner, lambda inner: inner)[seed // 4](toy)
    harness = EngineHarness(
        runner, num_channels=3, num_blocks=(14, 25, 200)[seed % 3], max_num_seqs=int(random.integers(6, 17)),
        max_num_batched_tokens=int(random.integers(16, 64)), scheduling_policy=("fcfs", "priority")[seed % 2], **SIZES,
    )  # fmt: skip
    run = RandomRun(harness, random)
    run.run(requests)
    harness.check_nothing_left()
    for index, (_, stream) in enumerate(run.streams):
        told, told_alone = outcome(stream), outcome(expected[index], nearly)
        if index in run.cancelled and stream.reason == FinishReason.ABORT:
            count = len(stream.token_ids)
            assert told[:2] == (told_alone[0][:count], told_alone[1][:count]) and told[4][0] == count
        else:
            assert told == told_alone
    if isinstance(runner, RulesRunner):
        assert runner.num_ahead > 0
