"""Every architecture, checked against transformers on a tiny random checkpoint."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.models.paged_loop import PagedLoop
from tests.models.tiny_checkpoints import MODELS, save_tiny_checkpoint
from tokring.checkpoint import open_checkpoint
from tokring.engine.cpu_runner import CpuRunner, DTypeName
from tokring.models.errors import ModelError
from tokring.models.linear import INPUTS_MULTIPLE

MAX_LENGTH = 160
PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 131, size=45)]


@dataclass
class Reference:
    """A checkpoint on disk and transformers' answer to PROMPT."""

    path: Path
    model: Any
    greedy: list[int]


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = tmp_path_factory.mktemp(request.param)
    model = save_tiny_checkpoint(request.param, path)
    output = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return Reference(path, model, output[0, len(PROMPT) :].tolist())


def build_runner(reference: Reference, dtype: DTypeName) -> CpuRunner:
    """Up to the trained length, so that LongRoPE takes its short factors as transformers does for short sequences."""
    config = reference.model.config
    trained = getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
    return CpuRunner(
        open_checkpoint(str(reference.path)),
        dtype=dtype,
        max_model_len=min(trained, config.max_position_embeddings),
        max_num_batched_tokens=64,
    )


def test_greedy_ids_equal_transformers(reference: Reference) -> None:
    loop = PagedLoop(build_runner(reference, "float32"), num_sequences=2, max_length=MAX_LENGTH)
    assert loop.greedy(PROMPT, 64) == reference.greedy
    assert loop.greedy(PROMPT, 64, chunk=7) == reference.greedy


def test_float32_logits_are_near_transformers(reference: Reference) -> None:
    assert relative_error(prefill_logits(reference, "float32"), reference) < 1e-5


def test_bfloat16_logits_are_at_least_as_near_as_those_of_transformers_in_bfloat16(reference: Reference) -> None:
    if reference.model.config.hidden_size % INPUTS_MULTIPLE:
        with pytest.raises(ModelError, match="needs --dtype float32"):
            build_runner(reference, "bfloat16")
        return
    theirs = copy.deepcopy(reference.model).bfloat16()(torch.tensor([PROMPT])).logits[0].float().numpy()
    error = relative_error(prefill_logits(reference, "bfloat16"), reference)
    assert error < 0.05
    assert error < relative_error(theirs, reference)


def prefill_logits(reference: Reference, dtype: DTypeName) -> NDArray[np.float32]:
    loop = PagedLoop(build_runner(reference, dtype), num_sequences=1, max_length=MAX_LENGTH)
    return loop.prefill(PROMPT)[1]


def relative_error(logits: NDArray[np.float32], reference: Reference) -> float:
    """Root mean square of the difference from transformers' float32 logits, in their standard deviations."""
    expected = reference.model(torch.tensor([PROMPT])).logits[0].numpy()
    return float(np.sqrt(np.mean((logits - expected) ** 2)) / expected.std())
