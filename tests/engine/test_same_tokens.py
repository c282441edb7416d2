"""Promise B on the CPU runner: a request's tokens are the same alone and in whatever company and circumstances."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.engine_harness import EngineHarness
from tests.support.tiny_hf import write_tiny_hf
from tokring.checkpoint import open_checkpoint
from tokring.engine.cpu_runner import CpuRunner

MAX_MODEL_LEN = 96
MAX_TOKENS = 12
NUM_REQUESTS = 64
PROMPTS = [
    np.random.default_rng(i // 2 if i % 4 else i).integers(3, 60, 5 + 7 * i % 50).tolist() for i in range(NUM_REQUESTS)
]


def sampling(i: int) -> dict[str, float]:
    """Half of them greedy, a quarter with penalties."""
    fields: dict[str, float] = {"max_tokens": MAX_TOKENS, "seed": i}
    if i % 2:
        fields |= {"temperature": 0.9, "top_p": 0.95}
    if i % 4 == 1:
        fields |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    return fields


@pytest.fixture(scope="module", params=[("float32", "auto"), ("auto", "auto"), ("auto", "int8")], ids="-".join)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuRunner:
    directory: Path = write_tiny_hf(tmp_path_factory.mktemp("tiny"))
    return CpuRunner(
        open_checkpoint(str(directory)),
        dtype=request.param[0],
        kv_cache_dtype=request.param[1],
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=256,
    )


@pytest.fixture(scope="module")
def alone(runner: CpuRunner) -> list[list[int]]:
    harness = EngineHarness(runner, max_model_len=MAX_MODEL_LEN, num_blocks=6, enable_prefix_caching=False)
    return [harness.generate(prompt, **sampling(i)) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 2},
        {"max_num_seqs": 7, "max_num_batched_tokens": 16},
        {"max_num_seqs": 33, "max_num_batched_tokens": 40, "num_channels": 3},
        {"max_num_seqs": 64, "max_num_batched_tokens": 256},
        {"max_num_seqs": 16, "num_blocks": 14},
        {"max_num_seqs": 16, "num_blocks": 20, "max_num_batched_tokens": 23, "scheduling_policy": "priority"},
    ],
    ids=["two at once", "small chunks", "three front ends", "64 at once", "preempted", "all of it"],
)
def test_every_request_gets_the_tokens_it_gets_alone(runner, alone, config):
    harness = EngineHarness(runner, **({"max_model_len": MAX_MODEL_LEN, "num_blocks": 400} | config))
    streams = [
        harness.channels[i % len(harness.channels)].submit(prompt, priority=i % 3, **sampling(i))
        for i, prompt in enumerate(PROMPTS)
    ]
    harness.run()
    assert [stream.token_ids for stream in streams] == alone
    assert (harness.core.scheduler.num_preemptions > 0) == (harness.config.num_blocks < 100)
    again = [harness.submit(prompt, **sampling(i)) for i, prompt in enumerate(PROMPTS[:8])]
    harness.run()
    assert [stream.token_ids for stream in again] == alone[:8]
    assert harness.core.scheduler.prefix_hits > 0
    harness.check_nothing_left()
