"""Penalties, bias, bans, grammars and logprobs on the CUDA runner, emulated: what the host's sampler makes of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.engine.test_cuda_runner import SIZES, cpu_runner, cuda_runner
from tests.support.engine_harness import EngineHarness
from tests.support.fake_channel import Stream
from tests.support.shadowed_runner import ShadowedRunner
from tests.support.tiny_hf import write_tiny_hf
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer_json
from tokring.checkpoint import Checkpoint, open_checkpoint
from tokring.engine.cuda import rules
from tokring.engine.cuda.rules import history_parts
from tokring.engine.cuda.step_buffer import StepBuffer
from tokring.engine.grammar import GrammarTokenizer
from tokring.engine.grammar_compiler import GrammarCompiler
from tokring_ipc import ErrorCode, ExtensionKind, FinishReason

pytestmark = pytest.mark.timeout(900)  # kernels are compiled at first use
FEW = {"max_num_seqs": 4, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(write_tiny_hf(tmp_path_factory.mktemp("tiny"), head_dim=64)))


@contextmanager
def grammar_compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(GrammarTokenizer(tiny_tokenizer_json(), VOCAB_SIZE, [EOS_ID]))
    try:
        yield compiler
    finally:
        compiler.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with grammar_compiler() as compiler:
        yield compiler


def ids(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def words(*values: tuple[int, ...]) -> bytes:
    return ids(len(values), *map(len, values), *(token for word in values for token in word))


FEW_IDS = (7, 8, 9, 11)  # of four tokens in all, any pair comes soon
RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "temperature": 0.7, "num_logprobs": 2},
    {"frequency_penalty": 0.9, "presence_penalty": -0.4},
    {
        "extensions": [
            (ExtensionKind.ALLOWED_IDS, ids(*FEW_IDS)),
            (ExtensionKind.BAD_WORDS, words((7, 7), (8, 9), (9,))),
        ]
    },
    {
        "extensions": [
            (ExtensionKind.ALLOWED_IDS, ids(*FEW_IDS)),
            (ExtensionKind.LOGIT_BIAS, ids(8, 11) + struct.pack("ff", 3.0, -2.5)),
            (ExtensionKind.BAD_WORDS, words((8, 8), (8, 11, 8))),
        ],
        "temperature": 1.0,
    },
    {"stop_ids": list(range(40, 48)), "extensions": [(ExtensionKind.STOP_IDS, ids(*range(60, 300)))], "min_tokens": 4},
    {"extensions": [(ExtensionKind.LOGPROB_IDS, ids(5, 90, 41))], "num_logprobs": 0},
    {"num_logprobs": 3, "temperature": 0.8},
    {"repetition_penalty": 0.8, "extensions": [(ExtensionKind.LOGPROB_IDS, ids(3, 77))], "num_logprobs": 0},
]  # fmt: skip
NEEDING_TOKENS: list[dict[str, Any]] = [
    {"num_prompt_logprobs": 2, "num_logprobs": 1},
    {
        "extensions": [(ExtensionKind.GRAMMAR_REGEX, b"[a-c]{3,9}")],
        "num_logprobs": 1,
        "stop_ids": [EOS_ID],
        "eos_mask": 1,
    },
    {
        "extensions": [(ExtensionKind.GRAMMAR_REGEX, b"x+"), (ExtensionKind.ALLOWED_IDS, ids(*FEW_IDS))],
        "repetition_penalty": 1.2,
    },
    {"max_tokens": 0, "num_prompt_logprobs": 1},
]  # fmt: skip


def run(runner: Any, compiler: GrammarCompiler, requests: list[dict[str, Any]], **config: Any) -> list[Stream]:
    harness = EngineHarness(runner, **(SIZES | FEW | config))
    harness.core.grammars = compiler
    random = np.random.default_rng(5)
    streams = [
        harness.submit(
            fields.pop("prompt", random.integers(3, 60, 4 + 5 * i % 17)),
            **({"max_tokens": 7 + i % 4, "seed": i} | fields),
        )
        for i, fields in enumerate(map(dict, requests))
    ]
    harness.finish(deadline_s=600)
    harness.check_nothing_left()
    return streams


def test_steps_with_rules_run_ahead_and_every_one_draws_what_the_host_would(checkpoint, compiler):
    runner = ShadowedRunner(cuda_runner(checkpoint, **FEW), cpu_runner(checkpoint))
    streams = run(runner, compiler, RULES)
    assert all(stream.reason in (FinishReason.LENGTH, FinishReason.STOP) for stream in streams)
    assert set(streams[2].token_ids + streams[3].token_ids) <= set(FEW_IDS)
    assert runner.num_ruled_ahead > 20 and runner.num_logprobs > 40


def test_rules_that_leave_no_token_are_the_clients_error(checkpoint, compiler):
    nothing = [(ExtensionKind.ALLOWED_IDS, ids(8)), (ExtensionKind.BAD_WORDS, words((8,)))]
    runner = cuda_runner(checkpoint, **FEW)
    allocate = runner.allocate_kv_cache
    runner.allocate_kv_cache = lambda num_blocks: (allocate(num_blocks), runner.warm_up())  # as the engine starts
    contradictory, neighbour = run(runner, compiler, [{"extensions": nothing, "num_logprobs": 1}, RULES[0]])
    assert contradictory.reason == FinishReason.ERROR and contradictory.token_ids == []
    assert contradictory.finish["error_code"] == ErrorCode.INVALID_REQUEST
    assert neighbour.reason == FinishReason.LENGTH


def test_tokens_of_many_that_join_at_once_are_sent_in_parts_that_fit_one_small_buffer(checkpoint, monkeypatch):
    """A prompt in the prefix cache: all of them join in the same step, behind more tokens than the buffer holds."""
    most_words = 300
    monkeypatch.setattr(rules, "MOST_HISTORY_WORDS", most_words)
    device_runner = cuda_runner(checkpoint, max_num_seqs=4, max_num_batched_tokens=48)
    runner = ShadowedRunner(device_runner, cpu_runner(checkpoint))
    harness = EngineHarness(runner, **(SIZES | {"max_num_seqs": 4}))
    prompt = list(range(3, 60))
    harness.submit(prompt, max_tokens=1)
    harness.finish(deadline_s=600)
    buffer = device_runner._special_steps.rules._histories
    room, sizes = len(buffer._on_device), []
    send = buffer.send
    buffer.send = lambda arrays: (sizes.append((len(arrays[0]), sum(array.size for array in arrays))), send(arrays))[1]
    for i in range(4):
        harness.submit(prompt[: 50 + i], max_tokens=5, repetition_penalty=1.5, frequency_penalty=0.5)
    harness.finish(deadline_s=600)
    assert sum(count for count, _ in sizes) == 4 and len(sizes) == 2
    assert max(words for _, words in sizes) <= most_words
    assert len(buffer._on_device) == room
    assert runner.num_ruled >= 20


def test_histories_are_parted_by_length_and_a_long_one_goes_alone():
    lengths = np.array([5, 900, 7, 100, 6, 100], np.int32)
    parts = [part.tolist() for part in history_parts(lengths, 400)]
    assert parts == [[1], [3, 5], [2, 4, 0]]
    assert history_parts(lengths[:0], 400) == []


def outcome(stream: Stream) -> tuple[Any, ...]:
    """All but the values of logprobs; without the padding to those of neighbours."""
    drawn = [(rank, [i for i in top if i >= 0]) for rank, _, top, _ in stream.logprobs]
    prompt = [(position, rank, top) for position, rank, _, top in stream.prompt_logprobs]
    return stream.token_ids, drawn, prompt, stream.reason, int(stream.finish["error_code"])


def logprobs(stream: Stream) -> list[float]:
    drawn = [(x, *(y for y, i in zip(values, top, strict=True) if i >= 0)) for _, x, top, values in stream.logprobs]
    return [x for entry in drawn for x in entry] + [x for _, _, x, _ in stream.prompt_logprobs]


def test_clients_are_told_what_a_host_that_samples_tells_them(checkpoint, compiler):
    """All kinds together, with requests that leave, move to other lanes and are preempted on the way."""
    prompt = range(5, 75)
    every_token_but_9 = words(*((*prompt[-65:], token) for token in range(VOCAB_SIZE) if token != 9))
    behind_long_words = {"prompt": prompt, "extensions": [(ExtensionKind.BAD_WORDS, every_token_but_9)]}
    requests = [fields for pair in zip(RULES, NEEDING_TOKENS * 2, strict=True) for fields in pair]
    requests.append(behind_long_words)
    results = []
    for on_device in (True, False):
        runner = cuda_runner(checkpoint, **FEW)
        runner.draws_by_rules = on_device
        results.append(run(WarmedUp(runner), compiler, requests, num_blocks=6))
    assert results[0][-1].token_ids[0] == 9
    for ours, theirs in zip(*results, strict=True):
        assert outcome(ours) == outcome(theirs)
        np.testing.assert_allclose(logprobs(ours), logprobs(theirs), atol=5e-5)


class WarmedUp:
    """Captures its graphs once there is a cache."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._runner.allocate_kv_cache(num_blocks)
        self._runner.warm_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def sent_words(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every copy of a step buffer from now on."""
    sent: list[int] = []
    send = StepBuffer.send
    monkeypatch.setattr(
        StepBuffer,
        "send",
        lambda self, arrays: (sent.append(sum(array.size for array in arrays)), send(self, arrays))[1],
    )
    return sent


def test_rules_send_nothing_while_nothing_changes(checkpoint, compiler, monkeypatch):
    runner = cuda_runner(checkpoint, **FEW)
    sent = sent_words(monkeypatch)
    harness = EngineHarness(runner, **(SIZES | FEW))
    runner.warm_up()
    for fields in (RULES[0] | {"num_logprobs": -1}, RULES[1], RULES[3]):
        harness.submit(list(range(5, 10)), **(fields | {"max_tokens": 15}))
    for _ in range(3):
        harness.core.step()
    sent.clear()
    for _ in range(5):
        harness.core.step()
    assert sent == []
