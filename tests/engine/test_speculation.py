"""Speculation by n-gram lookup: the same tokens in fewer steps, whatever else goes on."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.engine_harness import EngineHarness
from tests.support.serving import mock_server, tiny_model
from tests.support.toy_runner import ToyRunner
from tokring import LLM, SamplingParams
from tokring.config import ConfigError, EngineSettings
from tokring.engine.step_batch import StepBatch
from tokring.engine.step_stats import StepStats
from tokring.speculative_config import SpeculativeConfig
from tokring_ipc import ErrorCode, FinishReason

DRAFTS = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


class CountingRunner(ToyRunner):
    """Its next token is the last one plus one: what a loop of text looks like."""

    def execute(self, batch: StepBatch) -> NDArray[np.float32]:
        super().execute(batch)
        logits = np.zeros((len(batch.logits_index), self.vocab_size), np.float32)
        last = batch.token_ids[batch.logits_index]
        logits[np.arange(len(logits)), (last + 1) % self.vocab_size] = 9.0
        logits[last == self.nan_after_token] = np.nan
        return logits


class CountingPage:
    """A stats page as a dict."""

    def __init__(self) -> None:
        self.counts: dict[Any, int] = {}

    def add(self, stat: Any, amount: int = 1, instance: int = 0) -> None:
        key = (stat, instance) if instance else stat
        self.counts[key] = self.counts.get(key, 0) + amount

    def set(self, stat: Any, value: int, instance: int = 0) -> None:
        pass

    def observe(self, stat: Any, value: float, instance: int = 0) -> None:
        pass


def random_request(rng: np.random.Generator, vocab_size: int) -> tuple[list[int], dict[str, Any]]:
    fields: dict[str, Any] = {"max_tokens": int(rng.integers(1, 60)), "seed": int(rng.integers(1 << 40))}
    if rng.random() < 0.6:
        fields |= {"temperature": float(rng.choice([0.3, 1.0])), "top_p": float(rng.choice([1.0, 0.8]))}
    if rng.random() < 0.3:
        fields["stop_ids"] = rng.integers(0, vocab_size, 2).tolist()
    if rng.random() < 0.2:
        fields["num_logprobs"] = 2
    if rng.random() < 0.2:
        fields["repetition_penalty"] = 1.3
    if rng.random() < 0.2:
        fields["min_tokens"] = min(5, fields["max_tokens"])
    return rng.integers(0, vocab_size, int(rng.integers(1, 60))).tolist(), fields


@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_the_tokens_that_it_gets_without_speculation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab_size = 4  # so small that most lookups find something and many drafts are right
    requests = [random_request(rng, vocab_size) for _ in range(40)]
    plain = EngineHarness(ToyRunner(vocab_size), max_model_len=128, num_blocks=64)
    expected = []
    for ids, fields in requests:
        expected.append(plain.submit(ids, **fields))
        plain.run()
    engine = EngineHarness(
        ToyRunner(vocab_size), max_model_len=128, num_blocks=12, max_num_seqs=8, max_num_batched_tokens=24, **DRAFTS
    )
    page = CountingPage()
    engine.core.stats = StepStats(page)
    streams = []
    for ids, fields in requests:
        streams.append(engine.submit(ids, **fields))
        for _ in range(int(rng.integers(0, 3))):
            engine.core.step()
            engine.check_consistent()
    engine.run()
    for stream, alone in zip(streams, expected, strict=True):
        assert stream.token_ids == alone.token_ids
        assert stream.reason == alone.reason
        assert stream.logprobs == alone.logprobs
        assert stream.finish is not None and stream.finish["num_output_tokens"] == len(stream.token_ids)
    engine.check_nothing_left()
    assert engine.core.scheduler.num_preemptions > 0
    accepted = page.counts["spec_decode_num_accepted_tokens"]
    assert 0 < accepted < page.counts["spec_decode_num_draft_tokens"]
    per_position = [page.counts.get(("spec_decode_num_accepted_tokens_per_pos", place), 0) for place in range(1, 4)]
    assert accepted == sum(per_position) + page.counts["spec_decode_num_accepted_tokens_per_pos"]
    assert accepted == sum(int(stream.finish["num_accepted_tokens"]) for stream in streams if stream.finish is not None)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_loop_takes_a_fifth_of_the_steps(period: int) -> None:
    engine = EngineHarness(CountingRunner(period), **DRAFTS)
    stream = engine.submit([*range(period)] * 3, max_tokens=50)
    steps = engine.run()
    assert stream.token_ids == [number % period for number in range(50)]
    assert steps == 1 + 10  # the prompt's step gives one token, each other one five, the last four
    assert stream.finish is not None and stream.finish["num_accepted_tokens"] == 39
    engine.check_nothing_left()


def test_a_loop_stops_where_it_must() -> None:
    engine = EngineHarness(CountingRunner(7), **DRAFTS)
    prompt = [*range(7), *range(7)]
    stream = engine.submit(prompt, max_tokens=50, stop_ids=[5])
    engine.run()
    assert stream.token_ids == [0, 1, 2, 3, 4, 5] and stream.reason == FinishReason.STOP
    engine.check_nothing_left()


def test_logits_that_are_not_finite_end_a_sequence_where_they_do_without_drafts() -> None:
    ends = []
    for config in (DRAFTS, {}):
        runner = CountingRunner(7)
        runner.nan_after_token = 2
        engine = EngineHarness(runner, **config)
        stream = engine.submit([*range(7), *range(7)])  # drafts go beyond the 2
        engine.run()
        assert stream.finish is not None
        ends.append((stream.token_ids, stream.reason, int(stream.finish["error_code"])))
        engine.check_nothing_left()
    assert ends[0] == ends[1] == ([0, 1, 2], FinishReason.ERROR, ErrorCode.NOT_FINITE)


def test_a_real_model_says_the_same_with_and_without() -> None:
    prompts = ["one two one two one two", "a", "the cat and the dog and the cat and"]
    params = [
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
        SamplingParams(temperature=0.7, max_tokens=48, seed=3, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, stop="zz", logprobs=1),
    ]
    outputs = []
    drafts = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    for speculative_config in (None, drafts):
        with LLM(tiny_model(), max_model_len=256, max_num_seqs=4, speculative_config=speculative_config) as llm:
            outputs.append([output.outputs for output in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]


def test_the_metrics_say_how_many_drafts_were_right() -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 1, "prompt_lookup_min": 1}'
    with mock_server("--speculative-config", config) as server:
        before = [line for line in metrics_of(server.url).splitlines() if line.startswith("vllm:spec_decode")]
        assert before and all(line.endswith(" 0") for line in before)  # every series is there from the start
        body = {"prompt": [5, 6] * 20, "max_tokens": 200, "ignore_eos": True}
        request = Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 200
        samples = [line for line in metrics_of(server.url).splitlines() if line.startswith("vllm:spec_decode")]
        values = {line.rsplit(" ", 1)[0]: int(line.rsplit(" ", 1)[1]) for line in samples}
    names = {name.split("{")[0].removeprefix("vllm:spec_decode_").removesuffix("_total") for name in values}
    assert names == {"num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"}
    drafted = next(value for name, value in values.items() if "num_draft_tokens" in name)
    assert drafted >= next(value for name, value in values.items() if "num_drafts" in name) > 0


def metrics_of(url: str) -> str:
    with urlopen(f"{url}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_unusable_settings_are_refused_by_name() -> None:
    for text in (
        '{"method": "eagle", "num_speculative_tokens": 3}',
        '{"method": "ngram"}',
        '{"method": "ngram", "num_speculative_tokens": 17}',
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2}',
    ):
        with pytest.raises(ConfigError, match="--speculative-config: "):
            EngineSettings(speculative_config=text)
    config = SpeculativeConfig.from_json('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}')
    assert config.lookup_range == (2, 2)
