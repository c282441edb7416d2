"""The embedded model on the torch runner: sensible answers by default, bfloat16 close to float32."""

from __future__ import annotations

import jinja2
import numpy as np
import pytest

from tests.models.paged_loop import PagedLoop
from tokring.checkpoint import Checkpoint, open_checkpoint
from tokring.engine.torch_runner import DTypeName, TorchRunner, resolve_dtype


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(None)


def build_loop(checkpoint: Checkpoint, dtype: DTypeName) -> PagedLoop:
    runner = TorchRunner(checkpoint, dtype=dtype, max_model_len=256, max_num_batched_tokens=128)
    return PagedLoop(runner, num_sequences=2, max_length=128)


def chat_ids(checkpoint: Checkpoint, question: str) -> list[int]:
    template = jinja2.Environment().from_string(checkpoint.chat_template or "")
    text = template.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True)
    ids: list[int] = checkpoint.load_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def test_the_capital_of_france_is_paris(checkpoint: Checkpoint) -> None:
    output = build_loop(checkpoint, "auto").greedy(chat_ids(checkpoint, "What is the capital of France?"), 8)
    assert "Paris" in checkpoint.load_tokenizer().decode(output)


def test_bfloat16_logits_are_near_those_of_float32(checkpoint: Checkpoint) -> None:
    ids = chat_ids(checkpoint, "Explain in two sentences why the sky is blue.")
    _, exact = build_loop(checkpoint, "float32").prefill(ids)
    _, rounded = build_loop(checkpoint, "bfloat16").prefill(ids)
    error = np.sqrt(np.mean((rounded - exact) ** 2)) / exact.std()
    assert 0 < error < 0.05
    agreement = np.mean(rounded.argmax(-1) == exact.argmax(-1))
    assert agreement > 0.8


def test_auto_is_float32_for_a_small_model_only(checkpoint: Checkpoint) -> None:
    assert resolve_dtype("auto", checkpoint.config) == "float32"
    assert resolve_dtype("bfloat16", checkpoint.config) == "bfloat16"
    seven_billion = {"hidden_size": 4096, "intermediate_size": 11008, "num_heads": 32, "num_kv_heads": 32}
    config = checkpoint.config.__class__(
        architecture="llama", num_layers=32, head_dim=128, vocab_size=32000, max_position_embeddings=4096,
        rms_norm_eps=1e-5, rope_theta=1e4, **seven_billion,
    )  # fmt: skip
    assert resolve_dtype("auto", config) == "bfloat16"


def test_progress_ends_at_the_total_and_never_falls(checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    TorchRunner(
        checkpoint,
        dtype="bfloat16",
        max_model_len=64,
        max_num_batched_tokens=32,
        progress=lambda done, total: seen.append((done, total)),
    )
    done = [progress[0] for progress in seen]
    assert done == sorted(done) and len(set(done)) > 20
    assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)


def test_a_block_is_as_large_as_its_arrays(checkpoint: Checkpoint) -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        runner = TorchRunner(checkpoint, dtype=dtype, max_model_len=64, max_num_batched_tokens=32)  # type: ignore[arg-type]
        assert runner.kv_bytes_per_block() == 30 * 2 * 3 * 16 * 64 * size
        with pytest.raises(RuntimeError, match="before allocate_kv_cache"):
            runner.execute(None)  # type: ignore[arg-type]
