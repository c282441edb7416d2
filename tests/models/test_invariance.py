"""All formats are batch-invariant: a row's logits have the same bits alone, in any batch, in any chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.paged_loop import PagedLoop
from tests.models.tiny_checkpoints import save_tiny_checkpoint
from tokring.checkpoint import open_checkpoint
from tokring.engine.cpu_runner import CpuRunner

MAX_LENGTH = 128
EMBEDDED = "embedded model"
TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 131, size=70)]


@dataclass
class Case:
    """A model, a sequence, and the bits of its logits when it is computed alone, one token at a time."""

    runner: CpuRunner
    tokens: list[int]
    alone: NDArray[np.uint32]
    batch_sizes: tuple[int, ...]


@pytest.fixture(
    scope="module",
    params=[
        ("llama-odd-sizes", "float32"),
        ("qwen3", "float32"),
        ("mistral", "float32"),
        ("gemma2", "float32"),
        ("gemma3", "float32"),
        ("phi3-partial-longrope", "float32"),
        ("qwen2", "bfloat16"),
        ("gemma3", "bfloat16"),
        ("mistral", "bfloat16", "int8"),
        (EMBEDDED, "float32"),
        (EMBEDDED, "auto"),  # Q4_1 as stored
        (EMBEDDED, "auto", "int8", 8),
    ],
    ids=lambda case: " ".join(map(str, case)),
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The embedded model takes 30 ms a step, so its case is smaller."""
    name, dtype, *others = request.param
    options = dict(zip(("kv_cache_dtype", "activation_bits"), others, strict=False))
    if name == EMBEDDED:
        checkpoint, tokens, batch_sizes = open_checkpoint(None), TOKENS[:24], (2, 21, 64)
    else:
        path = tmp_path_factory.mktemp(name)
        save_tiny_checkpoint(name, path)
        checkpoint, tokens = open_checkpoint(str(path)), TOKENS
        batch_sizes = (2, 3, 4, 5, 8, 9, 13, 17, 31, 32, 33, 48, 64)
    runner = CpuRunner(
        checkpoint,
        dtype=dtype,
        max_model_len=MAX_LENGTH,
        max_num_batched_tokens=64,
        **options,
    )
    loop = PagedLoop(runner, num_sequences=1, max_length=MAX_LENGTH)
    return Case(runner, tokens, bits(loop.prefill(tokens, chunk=1)[1]), batch_sizes)


def bits(logits: NDArray[np.float32]) -> NDArray[np.uint32]:
    return logits.view(np.uint32)


def test_the_runner_declares_itself_invariant(case: Case) -> None:
    assert case.runner.is_invariant


def test_a_prompt_has_the_same_bits_in_chunks_of_any_size(case: Case) -> None:
    for chunk in (2, 7, 16, 33, len(case.tokens)):
        loop = PagedLoop(case.runner, num_sequences=1, max_length=MAX_LENGTH)
        _, chunked = loop.prefill(case.tokens, chunk)
        assert np.array_equal(bits(chunked), case.alone), f"other bits in chunks of {chunk}"


def test_a_decoding_row_has_the_same_bits_in_batches_of_2_to_64(case: Case) -> None:
    rng = np.random.default_rng(11)
    most = max(case.batch_sizes)
    loop = PagedLoop(case.runner, num_sequences=1 + most, max_length=MAX_LENGTH)
    sequence, _ = loop.prefill(case.tokens[:-1])
    crowd = [loop.add() for _ in range(most)]
    loop.step({other: rng.integers(3, 131, size=1 + other % 5).tolist() for other in crowd})
    for size in case.batch_sizes:
        others = rng.permutation(crowd)[: size - 1].tolist()
        order = np.insert(others, rng.integers(size), sequence).tolist()
        logits = loop.step({member: case.tokens[-1:] if member == sequence else [7] for member in order})
        loop.rewind(sequence, 1)
        assert np.array_equal(bits(logits[sequence])[0], case.alone[-1]), f"other bits in a batch of {size}"


def test_a_prefilling_row_has_the_same_bits_beside_decoding_ones(case: Case) -> None:
    loop = PagedLoop(case.runner, num_sequences=10, max_length=MAX_LENGTH)
    crowd = [loop.add() for _ in range(9)]
    loop.step({other: TOKENS[: other + 1] for other in crowd})
    sequence = loop.add()
    for start, stop in ((0, 11), (11, 12), (12, len(case.tokens))):
        batch = {crowd[0]: [5], sequence: case.tokens[start:stop], **{other: [9] for other in crowd[1:]}}
        assert np.array_equal(bits(loop.step(batch)[sequence]), case.alone[start:stop])
