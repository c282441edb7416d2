"""The one-call decoder gives the bits of the Python one, and steps aside for models it does not cover."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.paged_loop import PagedLoop
from tests.models.tiny_checkpoints import save_tiny_checkpoint
from tokring.checkpoint import open_checkpoint
from tokring.engine.cpu_runner import CpuRunner

PROMPTS = [np.random.default_rng(seed).integers(3, 131, size=5 + 17 * seed).tolist() for seed in range(3)]


def build_runner(name: str, path: Path) -> CpuRunner:
    if name != "embedded model":
        save_tiny_checkpoint(name, path)
    checkpoint = open_checkpoint(None if name == "embedded model" else str(path))
    return CpuRunner(checkpoint, dtype="auto", max_model_len=128, max_num_batched_tokens=128)


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "llama-llama3-rope", "qwen2-window", "qwen3", "mistral", "embedded model"]
)
def test_covered_models_have_the_same_bits_natively(name: str, tmp_path: Path) -> None:
    runner = build_runner(name, tmp_path)
    assert runner.runs_natively
    results = []
    for uses_native in (True, False):
        if not uses_native:
            runner._native = None
        loop = PagedLoop(runner, num_sequences=3, max_length=128)
        steps = [loop.step({loop.add(): prompt for prompt in PROMPTS})]
        steps += [loop.step({sequence: [token] for sequence in range(3)}) for token in (7, 99)]
        results.append(np.concatenate([logits for step in steps for logits in step.values()]).view(np.uint32))
    assert np.array_equal(*results)


@pytest.mark.parametrize("name", ["llama-biases", "gemma2", "gemma3", "phi3", "phi3-partial-longrope"])
def test_other_models_run_in_python(name: str, tmp_path: Path) -> None:
    assert not build_runner(name, tmp_path).runs_natively
