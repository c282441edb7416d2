"""Sampling: the very token of the reference, whatever the level, the batch and the threads."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tokring_kernels
from tokring_kernels import _cpu, reference

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


def draw(logits: NDArray[np.float32], **params: Any) -> tuple[list[int], list[bool]]:
    """Samples all rows; each parameter is one value or one per row."""
    columns = {
        name: np.ascontiguousarray(np.broadcast_to(params.get(name, DEFAULTS[name]), len(logits)).astype(kind))
        for name, kind in KINDS.items()
    }
    tokens, finite = np.full(len(logits), -7, np.int32), np.zeros(len(logits), bool)
    tokring_kernels.sample(logits, **columns, out_token=tokens, finite=finite)
    return tokens.tolist(), finite.tolist()


def normal(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=(rows, vocab_size)) * scale).astype(np.float32)


def test_philox_gives_the_published_numbers() -> None:
    # Known-answer vectors of Random123: kat_vectors, philox4x32 with 10 rounds
    assert _cpu.philox4x32([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _cpu.philox4x32([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert _cpu.philox4x32(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert reference.philox4x32(tuple(pi[0]), tuple(pi[1])) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab_size=st.sampled_from([1, 2, 15, 17, 100, 513, 3000]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 5.0, 100.0]),
    temperature=st.sampled_from([0.0, 1e-30, 1e-5, 0.3, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 40, 100, 10_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.95, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**40),
    masked=st.booleans(),
    tied=st.booleans(),
)
def test_the_token_is_the_references_token(level: str, masked: bool, tied: bool, **params: Any) -> None:
    logits = normal(1, params.pop("vocab_size"), params["seed"] % 1000, params.pop("scale"))
    if tied:
        logits = np.round(logits)
    if masked:
        logits[0, 1::2] = -np.inf
    assert draw(logits, **params)[0] == [reference.sample(logits[0], **params)]


def test_a_large_vocabulary_gives_the_references_tokens(level: str) -> None:
    logits = normal(12, 49_152)
    params = {"temperature": 0.8, "top_k": [0, 50, 1000] * 4, "top_p": [0.9, 1.0, 0.5, 0.99] * 3, "min_p": 0.001}
    expected = [
        reference.sample(row, 0.8, params["top_k"][i], params["top_p"][i], 0.001, 0, 0, i)
        for i, row in enumerate(logits)
    ]
    assert draw(logits, **params, position=np.arange(12))[0] == expected


def test_rows_do_not_depend_on_the_batch_or_the_threads(level: str, threads: int) -> None:
    logits = normal(32, 2000)
    params = {"temperature": 1.2, "top_p": 0.9, "top_k": 300}
    together = draw(logits, seed=np.arange(32), position=np.arange(32) * 7, **params)[0]
    alone = [draw(logits[i : i + 1], seed=i, position=i * 7, **params)[0][0] for i in range(32)]
    assert together == alone


@pytest.mark.parametrize("at", [0, 1, 15, 16, 255, 256, 998, 999])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_on_ties(level: str, at: int) -> None:
    logits = normal(1, 1000)
    logits[0, at] = logits[0, 999] = 50.0
    for params in ({"temperature": 0.0}, {"temperature": 1e-38}, {"temperature": -1.0}, {"top_k": 1}):
        assert draw(logits, **params) == ([at], [True])


def test_sampled_tokens_follow_the_distribution(level: str) -> None:
    logits = np.repeat(np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32)), 20_000, axis=0)
    tokens = draw(logits, position=np.arange(20_000), seed=5)[0]
    share = np.bincount(tokens, minlength=4) / 20_000
    np.testing.assert_allclose(share, [0.5, 0.25, 0.125, 0.125], atol=0.012)  # > 3 standard deviations


def test_top_p_keeps_the_fewest_tokens_that_reach_the_share(level: str) -> None:
    logits = np.repeat(np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32)), 500, axis=0)
    positions = np.arange(500)
    assert set(draw(logits, top_p=0.35, position=positions)[0]) == {1}
    assert set(draw(logits, top_p=0.6, position=positions)[0]) == {1, 3}
    assert set(draw(logits, top_p=0.95, position=positions)[0]) == {0, 1, 2, 3}
    assert set(draw(logits, top_k=2, top_p=0.5, position=positions)[0]) == {1}  # 0.4 / 0.7 of what top-k left
    assert set(draw(logits, min_p=0.6, position=positions)[0]) == {1, 3}


@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf], ids=str)
@pytest.mark.parametrize("at", [0, 7, 63, 64, 99])
def test_a_poisoned_row_is_flagged_and_its_neighbours_are_not(level: str, poison: float, at: int) -> None:
    logits = normal(3, 100)
    expected = draw(logits, position=[0, 1, 2])[0]
    logits[1, at] = poison
    for temperature in (0.0, 1.0):
        tokens, finite = draw(logits, temperature=[1.0, temperature, 1.0], position=[0, 1, 2])
        assert finite == [True, False, True]
        assert tokens == [expected[0], -1, expected[2]]


def test_a_row_without_any_allowed_token_is_flagged(level: str) -> None:
    assert draw(np.full((1, 40), -np.inf, np.float32)) == ([-1], [False])


def test_only_unmasked_tokens_are_sampled(level: str) -> None:
    logits = np.repeat(normal(1, 100), 200, axis=0)
    allowed = [3, 31, 32, 64, 99]
    mask = np.repeat(tokring_kernels.bitmask_of([*allowed, 5000, -1], 100)[None], 200, axis=0)
    tokring_kernels.apply_bitmask(logits, mask)
    assert np.isfinite(logits).sum(axis=1).tolist() == [5] * 200
    assert set(draw(logits, temperature=10.0, position=np.arange(200))[0]) == set(allowed)


def test_a_bitmask_touches_only_the_rows_it_is_given_for() -> None:
    logits = np.zeros((3, 40), np.float32)
    mask = tokring_kernels.bitmask_of([1], 40)[None].view(np.int32)
    tokring_kernels.apply_bitmask(logits, mask, np.array([2], np.int32))
    assert np.isfinite(logits).sum(axis=1).tolist() == [40, 40, 1]
    with pytest.raises(ValueError, match="mask has 1 words a row, but 40 tokens need 2"):
        tokring_kernels.apply_bitmask(logits, mask[:, :1], np.array([2], np.int32))


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(-2, 33), max_size=30),
    split=st.integers(0, 30),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    presence=st.sampled_from([0.0, 0.5, -1.0]),
    frequency=st.sampled_from([0.0, 0.25, -0.5]),
)
def test_penalties_equal_the_reference(
    ids: list[int], split: int, repetition: float, presence: float, frequency: float
) -> None:
    before = normal(3, 32)
    logits = before.copy()
    split = min(split, len(ids))
    history = np.full((4, 40), 9, np.int32)
    history[3, : len(ids)] = ids
    one = [np.array([x], np.int32) for x in (1, 3, split, len(ids))]
    factors = [np.array([x], np.float32) for x in (repetition, presence, frequency)]
    tokring_kernels.apply_penalties(logits, one[0], history, *one[1:], *factors)
    known = np.array(ids, np.int32)
    expected = reference.apply_penalties(before[1], known[:split], known[split:], repetition, presence, frequency)
    np.testing.assert_allclose(logits[1], expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(logits[[0, 2]], before[[0, 2]])


def test_bias_is_added_and_minus_infinity_forbids() -> None:
    logits = np.zeros((2, 5), np.float32)
    rows, ids = np.array([0, 1, 1], np.int32), np.array([4, 2, 2], np.int32)
    tokring_kernels.apply_bias(logits, rows, ids, np.array([-np.inf, 1.5, 1.0], np.float32))
    assert logits.tolist() == [[0, 0, 0, 0, -np.inf], [0, 0, 2.5, 0, 0]]
    with pytest.raises(ValueError, match=r"ids\[1\] is 5, beyond the vocabulary of 5"):
        tokring_kernels.apply_bias(logits, rows, np.array([0, 5, 0], np.int32), np.zeros(3, np.float32))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(vocab_size=st.integers(1, 700), k=st.integers(0, 20), tied=st.booleans(), seed=st.integers(0, 1000))
def test_logprobs_equal_the_reference(level: str, vocab_size: int, k: int, tied: bool, seed: int) -> None:
    logits = normal(3, vocab_size, seed)
    if tied:
        logits = np.round(logits)
    k = min(k, vocab_size)
    chosen = np.random.default_rng(seed).integers(0, vocab_size, 3).astype(np.int32)
    got = tokring_kernels.logprobs(logits, chosen, k)
    for row in range(3):
        logprob, rank, top_ids, top = reference.logprobs(logits[row], int(chosen[row]), k)
        assert got.chosen[row] == pytest.approx(logprob, abs=2e-5)
        assert got.rank[row] == rank
        assert got.top_ids[row].tolist() == top_ids.tolist()
        np.testing.assert_allclose(got.top[row], top, atol=2e-5)


def test_logprobs_of_a_poisoned_row_are_nan_with_rank_zero() -> None:
    logits = normal(2, 50)
    logits[0, 3] = np.nan
    got = tokring_kernels.logprobs(logits, np.array([1, 1], np.int32), 2)
    assert np.isnan(got.chosen[0]) and got.rank[0] == 0 and got.top_ids[0].tolist() == [-1, -1]
    assert np.isfinite(got.chosen[1])
