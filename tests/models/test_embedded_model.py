"""The embedded model on the torch runner: sensible answers by default, bfloat16 close to float32."""

from __future__ import annotations

import jinja2
import numpy as np
import pytest

from tests.models.paged_loop import PagedLoop
from tokring.checkpoint import Checkpoint, open_checkpoint
from tokring.engine.cpu_runner import CpuRunner, DTypeName, KvCacheDType
from tokring.models.linear import ActivationBits


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(None)


def build_loop(
    checkpoint: Checkpoint, dtype: DTypeName, cache: KvCacheDType = "auto", activation_bits: ActivationBits = 15
) -> PagedLoop:
    runner = CpuRunner(
        checkpoint,
        dtype=dtype,
        max_model_len=256,
        max_num_batched_tokens=128,
        kv_cache_dtype=cache,
        activation_bits=activation_bits,
    )
    return PagedLoop(runner, num_sequences=2, max_length=128)


def chat_ids(checkpoint: Checkpoint, question: str) -> list[int]:
    template = jinja2.Environment().from_string(checkpoint.chat_template or "")
    text = template.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True)
    ids: list[int] = checkpoint.load_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_the_capital_of_france_is_paris(checkpoint: Checkpoint, cache: KvCacheDType) -> None:
    output = build_loop(checkpoint, "auto", cache).greedy(chat_ids(checkpoint, "What is the capital of France?"), 8)
    assert "Paris" in checkpoint.load_tokenizer().decode(output)


@pytest.mark.parametrize(
    ("dtype", "cache", "activation_bits", "tolerance"),
    [("auto", "auto", 15, 0.012), ("auto", "int8", 15, 0.05), ("auto", "auto", 8, 0.1), ("bfloat16", "auto", 15, 0.03)],
)
def test_logits_are_near_those_of_float32(
    checkpoint: Checkpoint,
    dtype: DTypeName,
    cache: KvCacheDType,
    activation_bits: ActivationBits,
    tolerance: float,
) -> None:
    ids = chat_ids(checkpoint, "Explain in two sentences why the sky is blue.")
    _, exact = build_loop(checkpoint, "float32").prefill(ids)
    _, rounded = build_loop(checkpoint, dtype, cache, activation_bits).prefill(ids)
    error = np.sqrt(np.mean((rounded - exact) ** 2)) / exact.std()
    assert 0 < error < tolerance, error


def test_progress_ends_at_the_total_and_never_falls(checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    CpuRunner(
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
    formats: list[tuple[DTypeName, KvCacheDType, int]] = [
        ("float32", "auto", 4 * 64),
        ("auto", "auto", 2 * 64),
        ("auto", "int8", 64 + 4),
    ]
    for dtype, cache, vector_bytes in formats:
        runner = CpuRunner(checkpoint, dtype=dtype, max_model_len=64, max_num_batched_tokens=32, kv_cache_dtype=cache)
        assert runner.kv_bytes_per_block() == 30 * 2 * 3 * 16 * vector_bytes
        with pytest.raises(RuntimeError, match="before allocate_kv_cache"):
            runner.execute(None)  # type: ignore[arg-type]
