"""Everything at once on a tiny KV cache: random requests of all kinds, some aborted; then nothing may be left behind.

`python -m tests.engine.test_mixed_load 20000` runs the long form; the test is a short one.
"""

from __future__ import annotations

import logging
import struct
import sys
import time
from typing import Any

import numpy as np
import pytest

from tests.support.engine_harness import EngineHarness
from tests.support.fake_channel import FakeChannel, Stream
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer_json
from tests.support.toy_runner import ToyRunner
from tokring.engine.grammar import GrammarTokenizer
from tokring.engine.grammar_compiler import GrammarCompiler
from tokring.engine.grammar_text import llguidance_grammar
from tokring.engine.threaded_runner import ThreadedRunner
from tokring_ipc import ErrorCode, ExtensionKind, FinishReason

MAX_MODEL_LEN = 96
CANCELS_PER_STEP = 0.04  # about a tenth of the requests
INVALID_SHARE = 0.03
PLAIN = {
    "priority",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "num_logprobs",
    "stop_ids",
    "parent_slot",
    "choice_index",
}
GRAMMARS = [
    (ExtensionKind.GRAMMAR_REGEX, b"[a-z]{1,12}"),
    (ExtensionKind.GRAMMAR_REGEX, b"([0-9]{2},)+"),
    (ExtensionKind.GRAMMAR_CHOICE, b'["yes", "no", "perhaps not"]'),
    (ExtensionKind.GRAMMAR_JSON_SCHEMA, b'{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    (ExtensionKind.GRAMMAR_EBNF, b'start: "a" b\nb: "b" b | "c"\n'),
]


class RandomClient:
    """Keeps up to `in_flight` requests on each of several front ends, cancels some of them at any time."""

    def __init__(self, harness: EngineHarness, seed: int, in_flight: int = 24) -> None:
        self.harness = harness
        self.random = np.random.default_rng(seed)
        self.in_flight = in_flight
        self.open: list[tuple[FakeChannel, Stream, bool]] = []  # channel, stream, whether it is valid
        self.num_submitted = 0
        self.num_constrained = 0
        self.has_plain_spells = False  # times without requests that keep steps from running ahead
        self.reasons = dict.fromkeys(FinishReason, 0)

    def run(self, num_requests: int) -> None:
        """Submit and serve num_requests."""
        while self.num_submitted < num_requests or self.open:
            while self.num_submitted < num_requests and len(self.open) < self.in_flight:
                self.submit()
            if self.open and self.random.random() < CANCELS_PER_STEP:
                channel, stream, _ = self.open[self.random.integers(len(self.open))]
                channel.cancel(stream)
            if not self.harness.core.step():
                time.sleep(0.0005)  # a grammar is compiled
            self.collect()

    def submit(self) -> None:
        channel = self.harness.channels[self.random.integers(len(self.harness.channels))]
        invalid = self.random.random() < INVALID_SHARE
        prompt = self.prompt()
        fields = self.fields(channel, len(prompt))
        if self.has_plain_spells and self.num_submitted // 60 % 2:
            fields = {name: fields[name] for name in fields if name in PLAIN} | {"max_tokens": 1 + fields["max_tokens"]}
        if invalid:
            fields |= [{"temperature": np.nan}, {"top_p": 2.0}, {"num_logprobs": 99}][self.random.integers(3)]
        self.open.append((channel, channel.submit(prompt, **fields), not invalid))
        self.num_submitted += 1

    def prompt(self) -> list[int]:
        """Often with a common beginning, so that the prefix cache hits."""
        length = int(self.random.integers(1, 60))
        common = int(self.random.integers(3))
        shared = [common] * min(length, int(self.random.integers(0, 40)))
        return shared + self.random.integers(0, VOCAB_SIZE, length - len(shared)).tolist()

    def fields(self, channel: FakeChannel, num_prompt: int) -> dict[str, Any]:
        random = self.random
        fields: dict[str, Any] = {"max_tokens": int(random.integers(0, 40)), "priority": int(random.integers(-1, 2))}
        if random.random() < 0.5:
            fields |= {"temperature": 0.8, "top_p": 0.9, "top_k": int(random.integers(0, 9)), "min_p": 0.01}
        if random.random() < 0.2:
            fields |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.2}
        if random.random() < 0.2:
            fields["num_logprobs"] = int(random.integers(0, 6))
        if random.random() < 0.1:
            fields["num_prompt_logprobs"] = int(random.integers(0, 3))
        if random.random() < 0.3:
            fields["stop_ids"] = random.integers(0, VOCAB_SIZE, random.integers(1, 9)).tolist()
        if random.random() < 0.1:
            fields["min_tokens"] = int(random.integers(0, fields["max_tokens"] + 1))
        if random.random() < 0.1 and num_prompt > 1 and fields["max_tokens"]:
            fields["num_prior_output"] = 1
        siblings = [stream.stream_slot for of, stream, _ in self.open if of is channel]
        if siblings and random.random() < 0.2:
            fields |= {"parent_slot": siblings[random.integers(len(siblings))], "choice_index": 1}
        if fields["max_tokens"] and random.random() < 0.1:
            self.constrain(fields)
        else:
            fields["extensions"] = self.extensions()
        return fields

    def constrain(self, fields: dict[str, Any]) -> None:
        """Give a request a grammar; without what may contradict it."""
        for name in ("min_tokens", "num_prior_output"):
            fields.pop(name, None)
        grammar = GRAMMARS[self.random.integers(len(GRAMMARS))]
        fields |= {"extensions": [grammar], "stop_ids": [EOS_ID], "eos_mask": 1}
        self.num_constrained += 1

    def extensions(self) -> list[tuple[int, bytes]]:
        random = self.random
        ids = random.integers(0, VOCAB_SIZE, 3).astype(np.int32)
        possible = [
            (ExtensionKind.STOP_IDS, ids.tobytes()),
            (ExtensionKind.LOGIT_BIAS, ids.tobytes() + np.full(3, 2, np.float32).tobytes()),
            (ExtensionKind.ALLOWED_IDS, np.arange(50, dtype=np.int32).tobytes()),
            (ExtensionKind.BAD_WORDS, struct.pack("<3I", 2, 1, 2) + ids.tobytes()),
            (ExtensionKind.CACHE_SALT, b"tenant"),
            (ExtensionKind.LOGPROB_IDS, ids.tobytes()),
        ]
        return [item for item in possible if random.random() < 0.08]

    def collect(self) -> None:
        """Check and count what has ended."""
        still_open = []
        for channel, stream, valid in self.open:
            if stream.finish is None:
                still_open.append((channel, stream, valid))
                continue
            self.reasons[stream.reason] += 1
            self.check(stream, valid)
            channel.reuse(stream)
        self.open = still_open

    def check(self, stream: Stream, valid: bool) -> None:
        finish = stream.finish
        assert finish is not None
        error = ErrorCode(int(finish["error_code"]))
        if not valid and stream.reason != FinishReason.ABORT:
            assert error == ErrorCode.INVALID_REQUEST
        if valid:
            assert error in (ErrorCode.NONE, ErrorCode.INVALID_REQUEST), error.name
            assert error == ErrorCode.NONE, "a valid request was refused"
            assert len(stream.token_ids) <= MAX_MODEL_LEN


def mixed_load(num_requests: int, seed: int = 0, *, runs_ahead: bool = False) -> RandomClient:
    """Run it, with speculation or steps that run ahead; raises AssertionError if anything is lost, left or wrong."""
    compiler = GrammarCompiler(GrammarTokenizer(tiny_tokenizer_json(), VOCAB_SIZE, [EOS_ID]))
    # Without the vetting process: it has a limit of wall-clock time, which a busy machine may exceed.
    compiler._vetting.check = lambda kind, text, waited_s: llguidance_grammar(kind, text.decode())
    try:
        return _mixed_load(num_requests, seed, runs_ahead, compiler)
    finally:
        compiler.close()


def _mixed_load(num_requests: int, seed: int, runs_ahead: bool, compiler: GrammarCompiler) -> RandomClient:
    runner = ToyRunner(vocab_size=VOCAB_SIZE, block_size=8)
    harness = EngineHarness(
        ThreadedRunner(runner) if runs_ahead else runner,
        num_speculative_tokens=0 if runs_ahead else 3,
        prompt_lookup_min=1,
        num_channels=3,
        block_size=8,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=26,
        max_num_seqs=12,
        max_num_batched_tokens=48,
        max_queued=64,
        scheduling_policy="priority",
    )
    harness.core.grammars = compiler
    client = RandomClient(harness, seed)
    client.has_plain_spells = runs_ahead
    client.run(num_requests)
    harness.check_nothing_left()
    assert sum(client.reasons.values()) == num_requests
    assert not any(channel.streams for channel in harness.channels)
    return client


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["speculation", "running ahead"])
def test_a_random_mixed_load_leaves_nothing_behind(runs_ahead):
    client = mixed_load(300, runs_ahead=runs_ahead)
    assert client.num_constrained > 10
    assert client.harness.core.scheduler.num_preemptions > 10
    assert client.harness.core.scheduler.prefix_hits > 0
    assert client.reasons[FinishReason.ABORT] > 5


if __name__ == "__main__":
    logging.disable()  # each refusal is a line
    for ahead in (False, True):
        start_s = time.monotonic()
        finished = mixed_load(int(sys.argv[1]), runs_ahead=ahead)
        scheduler = finished.harness.core.scheduler
        print("running ahead:" if ahead else "speculation:", f"{finished.num_submitted} requests in", end=" ")
        print(f"{time.monotonic() - start_s:.0f} s,", {reason.name: n for reason, n in finished.reasons.items() if n})
        print(f"  {finished.num_constrained} with a grammar, {scheduler.num_preemptions} preemptions,", end=" ")
        print(f"{scheduler.prefix_hits} cached tokens, {scheduler.num_surplus} surplus tokens", flush=True)
