"""The embedded model's greedy ids equal those of transformers on the same weights, whatever the engine does."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.engine_harness import EngineHarness
from tests.support.fake_channel import Stream
from tokring.checkpoint import open_checkpoint
from tokring.checkpoint.export import export
from tokring.engine.cpu_runner import CpuRunner

IN_CI = os.environ.get("CI") == "true"
NUM_OUTPUT = 64 if IN_CI else 16  # a step of this model in float32 takes as long as the rest of most tests
STEP_ALONE = 1 if IN_CI else 10  # alone, all 20 prompts take 1,280 steps: in CI only
MAX_MODEL_LEN = 160
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain gravity to a child.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "What is 12 times 9?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Name five animals that can fly.",
)
CONTINUATIONS = (
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "The three most important inventions of the 20th century are",
    "import numpy as np\n\nx = np.arange(10)\nprint(",
    "1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "Water boils at",
    "   \n\n  3",
    "Ein Zug fährt von München nach",
)


@dataclass
class Reference:
    """The runner under test, transformers' model of the same float32 weights, and 20 prompts as ids."""

    runner: CpuRunner
    model: Any
    prompts: list[list[int]]
    expected: dict[int, list[int]] = field(default_factory=dict)  # by prompt: outputs found right already

    def check(self, streams: list[Stream], step: int = 1) -> None:
        """Every id is transformers' most probable one after the prompt and the ids before it, that is: greedy."""
        for index, stream in zip(range(0, len(self.prompts), step), streams, strict=True):
            prompt = self.prompts[index]
            assert len(stream.token_ids) == NUM_OUTPUT
            if index not in self.expected:
                logits = self.model(torch.tensor([prompt + stream.token_ids[:-1]])).logits[0]
                self.expected[index] = logits[len(prompt) - 1 :].argmax(-1).tolist()
            assert stream.token_ids == self.expected[index]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    checkpoint = open_checkpoint(None)
    directory: Path = tmp_path_factory.mktemp("reference")
    export(checkpoint, directory, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).requires_grad_(False)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in (*texts, *CONTINUATIONS)]
    runner = CpuRunner(checkpoint, dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=512)
    return Reference(runner, model, prompts)


@pytest.fixture
def harness(reference: Reference) -> Callable[..., EngineHarness]:
    """Builds an engine around the runner; its blocks hold all 20 sequences to their end unless told otherwise."""
    defaults = {"max_model_len": MAX_MODEL_LEN, "num_blocks": 220, "max_num_seqs": 20}
    return lambda **config: EngineHarness(reference.runner, **(defaults | config))


def run_all(engine: EngineHarness, reference: Reference) -> list[Stream]:
    streams = [engine.submit(prompt, max_tokens=NUM_OUTPUT) for prompt in reference.prompts]
    engine.run()
    return streams


@pytest.mark.timeout(400)
def test_alone(reference: Reference, harness: Callable[..., EngineHarness]) -> None:
    engine = harness(enable_prefix_caching=False)
    streams = []
    for prompt in reference.prompts[::STEP_ALONE]:
        streams.append(engine.submit(prompt, max_tokens=NUM_OUTPUT))
        engine.run()
    reference.check(streams, step=STEP_ALONE)


@pytest.mark.timeout(400)
def test_in_a_batch_of_20_and_again_with_prefix_hits(
    reference: Reference, harness: Callable[..., EngineHarness]
) -> None:
    engine = harness()
    first = run_all(engine, reference)
    reference.check(first)
    second = run_all(engine, reference)
    assert [stream.token_ids for stream in second] == [stream.token_ids for stream in first]
    assert sum(int(stream.finish["num_cached_tokens"]) for stream in second if stream.finish is not None) > 300


def test_with_prompts_cut_into_small_chunks(reference: Reference, harness: Callable[..., EngineHarness]) -> None:
    engine = harness(max_num_batched_tokens=23, enable_prefix_caching=False)
    reference.check(run_all(engine, reference))


def test_with_preemption_forced_by_a_tiny_kv_cache(reference: Reference, harness: Callable[..., EngineHarness]) -> None:
    engine = harness(num_blocks=48 if IN_CI else 32)
    streams = run_all(engine, reference)
    assert engine.core.scheduler.num_preemptions > 0
    reference.check(streams)
    assert np.all([stream.finish is not None for stream in streams])


@pytest.mark.timeout(400)
def test_stored_weights_give_the_same_ids_alone_and_in_a_batch_that_is_chunked_and_preempted() -> None:
    runner = CpuRunner(open_checkpoint(None), dtype="auto", max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=512)
    prompts = [list(range(1000 + 7 * i, 1000 + 7 * i + 20 + 5 * i)) for i in range(8)]
    config = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8}
    alone = [EngineHarness(runner, num_blocks=20, **config).generate(prompt, max_tokens=24) for prompt in prompts]
    engine = EngineHarness(runner, num_blocks=18, max_num_batched_tokens=19, **config)
    streams = [engine.submit(prompt, max_tokens=24) for prompt in prompts]
    engine.run()
    assert engine.core.scheduler.num_preemptions > 0
    assert [stream.token_ids for stream in streams] == alone
