"""sample draws the very token of the CPU kernel; logprobs equal the reference to 2e-5."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cuda.arrays import F32, int32, normal, unwritten
from tests.cuda.variants import LONG

import tokring_kernels
from tokring_kernels import reference
from tokring_kernels.cuda.launcher import EmulatedLauncher
from tokring_kernels.cuda.ops import CudaOps

KINDS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "choice": np.uint32,
    "position": np.int64,
}
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "choice": 0, "position": 0}


@pytest.fixture
def ops(launcher: EmulatedLauncher) -> CudaOps:
    return CudaOps(launcher)


def columns(num_rows: int, **params: Any) -> dict[str, NDArray[Any]]:
    """Each parameter is one value or one per row."""
    return {
        name: np.ascontiguousarray(np.broadcast_to(params.get(name, DEFAULTS[name]), num_rows).astype(kind))
        for name, kind in KINDS.items()
    }


def workspace(num_rows: int) -> NDArray[np.uint8]:
    return np.full(CudaOps.sample_workspace_bytes(num_rows), 0xFF, np.uint8)


def draw(ops: CudaOps, logits: F32, draw: int = 0, **params: Any) -> list[int]:
    by_row = columns(len(logits), **params)
    tokens = np.full(len(logits), -7, np.int32)
    position = by_row.pop("position").astype(np.int32)
    ops.sample(logits, **by_row, position=position, out_token=tokens, workspace=workspace(len(logits)), draw=draw)
    return tokens.tolist()


def drawn_by_cpu(logits: F32, draw: int = 0, **params: Any) -> list[int]:
    tokens, finite = np.zeros(len(logits), np.int32), np.zeros(len(logits), bool)
    by_row = columns(len(logits), **params)
    tokring_kernels.sample(logits, **by_row, out_token=tokens, finite=finite, draw=draw)
    return tokens.tolist()


def mixed_parameters(num_rows: int, seed: int) -> dict[str, NDArray[Any]]:
    """All cuts on and off in all combinations, extremes included."""
    rng = np.random.default_rng(seed)
    return {
        "temperature": rng.choice(
            [0.0, 1e-30, 1e-5, 0.3, 1.0, 2.0, 100.0], num_rows, p=[0.1, 0.05, 0.05, 0.2, 0.3, 0.2, 0.1]
        ),
        "top_k": rng.choice([-1, 0, 1, 2, 40, 1000, 10_000], num_rows),
        "top_p": rng.choice([1e-9, 0.1, 0.5, 0.95, 0.999999, 1.0], num_rows),
        "min_p": rng.choice([0.0, 0.0, 1e-6, 0.05, 1.0], num_rows),
        "seed": rng.integers(-(2**63), 2**63, num_rows),
        "choice": rng.integers(0, 2**32, num_rows),
        "position": rng.integers(0, 2**31, num_rows),
    }


@pytest.mark.parametrize(
    ("vocab_size", "shape"),
    [(1, "flat"), (17, "tied"), (1025, "masked"), (1025, "flat"), (3001, "wide"), (3001, "tied"), (2048, "flat")],
)
def test_the_token_is_the_cpu_kernels_token(ops: CudaOps, vocab_size: int, shape: str) -> None:
    logits = normal(12, vocab_size, scale={"wide": 8.0, "flat": 0.01}.get(shape, 2.0))
    if shape == "tied":
        logits = np.round(logits)
    if shape == "masked":
        logits[:, 1::2] = -np.inf
    params = mixed_parameters(12, vocab_size)
    assert draw(ops, logits, draw=3, **params) == drawn_by_cpu(logits, draw=3, **params)


@pytest.mark.parametrize("vocab_size", [49_152, 151_936, 32_003] if LONG else [151_936])
def test_a_large_vocabulary_gives_the_cpu_kernels_tokens(ops: CudaOps, vocab_size: int) -> None:
    logits = normal(4, vocab_size, scale=3.0)
    params = {
        "temperature": [0.8, 0.8, 1.2, 0.0],
        "top_k": [0, 50, 1000, 0],
        "top_p": [0.9, 1.0, 0.5, 0.99],
        "min_p": [0, 0.001, 0, 0],
    }
    assert draw(ops, logits, **params, position=np.arange(4)) == drawn_by_cpu(logits, **params, position=np.arange(4))


def test_rows_without_a_finite_maximum_give_no_token(ops: CudaOps) -> None:
    logits = normal(6, 100)
    logits[0, 99], logits[1, 0], logits[2, 50] = np.nan, -np.nan, np.inf
    logits[3] = -np.inf
    logits[4, 1:] = -np.inf
    assert draw(ops, logits, temperature=[1, 0, 1, 1, 1, 1])[:5] == [-1, -1, -1, -2, 0]
    assert draw(ops, logits, temperature=0.0)[:5] == [-1, -1, -1, -2, 0]


def test_rows_say_whose_parameters_apply_and_skip(ops: CudaOps) -> None:
    logits, params = normal(4, 300, scale=2.0), mixed_parameters(7, 5)
    rows = int32(6, -1, 0, 3)
    by_request = columns(7, **params)
    position = by_request.pop("position").astype(np.int32)
    tokens = np.full(7, -7, np.int32)
    ops.sample(logits, **by_request, position=position, out_token=tokens, workspace=workspace(4), rows=rows)
    used = rows[rows >= 0]
    expected = np.full(7, -7, np.int32)
    expected[used] = drawn_by_cpu(logits[rows >= 0], **{name: values[used] for name, values in params.items()})
    assert tokens.tolist() == expected.tolist()


def test_a_token_does_not_depend_on_its_row(ops: CudaOps) -> None:
    num_rows = 256 if LONG else 40
    logits = np.tile(normal(1, 1000), (num_rows, 1))
    temperature = np.zeros(num_rows)
    temperature[::32] = 1.5
    tokens = draw(ops, logits, temperature=temperature, top_p=0.9, seed=11, position=4)
    assert set(tokens[::32]) == set(drawn_by_cpu(logits[:1], temperature=1.5, top_p=0.9, seed=11, position=4))
    assert {token for row, token in enumerate(tokens) if row % 32} == {int(logits[0].argmax())}


class Logprobs:
    """Outputs of the op, NaN or 7 before."""

    def __init__(self, ops: CudaOps, logits: F32, chosen: NDArray[np.int32], k: int, entries: Any = None) -> None:
        self.logprob, self.rank = unwritten(len(chosen)), np.full(len(chosen), 7, np.int32)
        self.top_id, self.top = np.full((len(chosen), k), 7, np.int32), unwritten(len(chosen), k)
        scratch = workspace(len(chosen))
        ops.logprobs(logits, chosen, self.logprob, self.rank, self.top_id, self.top, scratch, entries=entries)


@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (40, 20), (1001, 0), (1001, 5), (20_003, 32)])
@pytest.mark.parametrize("tied", [False, True])
def test_logprobs_equal_the_reference(ops: CudaOps, vocab_size: int, k: int, tied: bool) -> None:
    logits = normal(5, vocab_size, scale=4.0)
    if tied:
        logits = np.round(logits / 4)  # far more ties at the k-th place than are ordered by counting
    chosen = np.random.default_rng(k).integers(0, vocab_size, 5).astype(np.int32)
    found = Logprobs(ops, logits, chosen, k)
    for row in range(5):
        logprob, rank, ids, top = reference.logprobs(logits[row], int(chosen[row]), k)
        assert found.rank[row] == rank and found.top_id[row].tolist() == ids.tolist()
        np.testing.assert_allclose(found.logprob[row], logprob, atol=2e-5)
        np.testing.assert_allclose(found.top[row], top, atol=2e-5)


def test_logprobs_of_chosen_rows(ops: CudaOps) -> None:
    logits = normal(4, 500)
    logits[3, 7] = np.nan
    found = Logprobs(ops, logits, int32(9, 1, -1, 5), 3, entries=int32(2, -1, 0, 3))
    logprob, rank, ids, _ = reference.logprobs(logits[2], 9, 3)
    assert found.rank.tolist() == [rank, 7, 0, 0] and found.logprob[1] == unwritten(1)[0]
    np.testing.assert_allclose(found.logprob[0], logprob, atol=2e-5)
    assert found.top_id.tolist()[:2] == [ids.tolist(), [7, 7, 7]]
    assert (
        np.isnan(found.logprob[2:]).all()
        and found.top_id[2].tolist() == reference.logprobs(logits[0], 0, 3)[2].tolist()
    )
    assert found.top_id[3].tolist() == [-1, -1, -1] and np.isnan(found.top[3]).all()


def test_sizes_that_do_not_fit_are_refused(ops: CudaOps) -> None:
    with pytest.raises(ValueError, match="k is 33, but must be at most 32"):
        Logprobs(ops, normal(1, 100), int32(0), 33)
    with pytest.raises(ValueError, match="workspace has 128 bytes, but 2 rows need 256"):
        params = columns(2)
        params["position"] = params["position"].astype(np.int32)
        ops.sample(normal(2, 8), **params, out_token=int32(0, 0), workspace=workspace(1))
