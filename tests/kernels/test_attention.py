"""Paged attention: right against numpy, and a row's bits its own."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tokring_kernels
from tokring_kernels import reference

BLOCK = tokring_kernels.BLOCK_SIZE


@dataclass
class Case:
    """A batch whose sequences live in shuffled blocks of one cache; unused cache slots hold NaN."""

    lengths: list[tuple[int, int]]  # (seq_len, query tokens) by sequence
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    bf16: bool = False
    int8: bool = False
    bf16_query: bool = False
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        widths = [-(-seq_len // BLOCK) for seq_len, _ in self.lengths]
        num_blocks = sum(widths) + 3
        ids = rng.permutation(num_blocks).astype(np.int32)
        self.block_table = np.full((len(widths), max(widths, default=0) + 1), -1, np.int32)
        shape = (num_blocks, self.num_kv_heads, BLOCK, self.head_dim)
        self.caches = [np.full(shape, np.nan, np.float32) for _ in range(2)]
        self.query_start = np.cumsum([0] + [tokens for _, tokens in self.lengths]).astype(np.int32)
        self.seq_lens = np.array([seq_len for seq_len, _ in self.lengths], np.int32)
        for seq, width in enumerate(widths):
            self.block_table[seq, :width], ids = ids[:width], ids[width:]
            for cache in self.caches:
                for position in range(self.seq_lens[seq]):
                    block = self.block_table[seq, position // BLOCK]
                    cache[block, :, position % BLOCK] = rng.normal(size=(self.num_kv_heads, self.head_dim))
        query = rng.normal(size=(self.query_start[-1], self.num_heads, self.head_dim)).astype(np.float32)
        self.query: NDArray[Any] = reference.narrow(query) if self.bf16_query else query
        if self.bf16:
            self.caches = [reference.narrow(cache) for cache in self.caches]
        if self.int8:
            unused = np.isnan(self.caches[0][..., 0])
            coded = [reference.quantize_kv(np.nan_to_num(cache), "int8") for cache in self.caches]
            self.caches = [codes for codes, _ in coded]
            scales = [np.where(unused, np.float32(np.nan), scale) for _, scale in coded]
            self.options = self.options | {"key_scale": scales[0], "value_scale": scales[1]}
        self.scale = self.head_dim**-0.5

    def run(self, out: NDArray[Any] | None = None) -> NDArray[Any]:
        if out is None:
            out = np.full(self.query.shape, np.nan, np.float32)
        tokring_kernels.paged_attention(
            self.query,
            *self.caches,
            self.block_table,
            self.query_start,
            self.seq_lens,
            self.scale,
            out,
            **self.options,
        )
        return out

    def expected(self) -> NDArray[np.float64]:
        return reference.paged_attention(
            self.query,
            *self.caches,
            self.block_table,
            self.query_start,
            self.seq_lens,
            self.scale,
            **self.options,
        )

    def alone(self, seq: int, tokens: slice) -> "Case":
        """The same case with nothing but some query tokens of one sequence; later positions are cut off."""
        other = Case.__new__(Case)
        other.__dict__.update(self.__dict__)
        start, stop = self.query_start[seq : seq + 2]
        other.query = self.query[start:stop][tokens]
        num_tokens = len(other.query)
        other.query_start = np.array([0, num_tokens], np.int32)
        first = self.seq_lens[seq] - (stop - start) + tokens.start
        other.seq_lens = np.array([first + num_tokens], np.int32)
        other.block_table = self.block_table[seq : seq + 1]
        return other


MIXED = [(1, 1), (16, 1), (300, 1), (17, 17), (600, 40), (257, 2), (256, 256), (513, 1)]


@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("cache", ["f32", "bf16", "int8"])
def test_attention_equals_the_reference_for_every_head_dim(level: str, head_dim: int, cache: str) -> None:
    bf16 = cache == "bf16"
    case = Case(MIXED, head_dim=head_dim, bf16=bf16, int8=cache == "int8", bf16_query=bf16)
    np.testing.assert_allclose(case.run(), case.expected(), atol=3e-6, rtol=1e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(
        st.integers(1, 330).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, min(n, 50)))), min_size=1, max_size=4
    ),
    heads=st.sampled_from([(1, 1), (4, 4), (9, 3), (8, 1), (14, 2), (5, 1), (40, 1)]),
    window=st.sampled_from([0, 1, 16, 33, 300]),
    soft_cap=st.sampled_from([0.0, 5.0]),
    cache=st.sampled_from(["f32", "bf16", "int8"]),
    seed=st.integers(0, 100),
)
def test_attention_equals_the_reference_for_any_shape(
    level: str,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int,
    soft_cap: float,
    cache: str,
    seed: int,
) -> None:
    options = {"sliding_window": window, "soft_cap": soft_cap}
    case = Case(lengths, *heads, head_dim=16, bf16=cache == "bf16", int8=cache == "int8", seed=seed, options=options)
    np.testing.assert_allclose(case.run(), case.expected(), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize("cache", ["f32", "bf16", "int8"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_chunk(
    level: str, threads: int, cache: str, options: dict[str, Any]
) -> None:
    case = Case(MIXED, bf16=cache == "bf16", int8=cache == "int8", options=options)
    together = case.run()
    for seq, (_, num_tokens) in enumerate(case.lengths):
        rows = together[case.query_start[seq] : case.query_start[seq + 1]]
        for chunk in (1, 7, 64):
            for start in range(0, num_tokens, chunk * 5):  # every fifth chunk: enough, and quick
                tokens = slice(start, min(start + chunk, num_tokens))
                assert np.array_equal(case.alone(seq, tokens).run(), rows[tokens])


def test_bits_do_not_depend_on_the_number_of_threads(level: str) -> None:
    before = tokring_kernels.num_threads()
    case = Case([(2000, 1)], num_heads=3, num_kv_heads=1)
    results = []
    for num_threads in (1, 2, 4):
        tokring_kernels.set_num_threads(num_threads)
        results.append(case.run())
    tokring_kernels.set_num_threads(before)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


def test_a_bfloat16_output_is_the_rounded_float32_output(level: str) -> None:
    case = Case(MIXED, bf16=True)
    narrow = case.run(np.zeros(case.query.shape, np.uint16))
    assert np.array_equal(narrow, reference.narrow(case.run()))


def test_query_may_be_a_slice_of_fused_projections(level: str) -> None:
    case = Case(MIXED)
    expected = case.run()
    fused = np.zeros((len(case.query), 10, case.head_dim), np.float32)
    fused[:, :6] = case.query
    case.query = fused[:, :6]
    assert np.array_equal(case.run(), expected)


def test_a_nan_query_stays_in_its_own_row(level: str) -> None:
    case = Case(MIXED)
    expected = case.run()
    case.query[5] = np.nan
    out = case.run()
    assert np.isnan(out[5]).all()
    assert np.array_equal(np.delete(out, 5, axis=0), np.delete(expected, 5, axis=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": np.zeros((8, 40), np.int64)}, r"block_table must be int32\[8, \*\], but is int64\[8, 40\]"),
        ({"block_table": np.full((8, 60), 10_000, np.int32)}, r"block_table\[0\]\[0\] is 10000, not a block"),
        ({"block_table": np.zeros((8, 2), np.int32)}, r"seq_lens\[2\] needs 19 blocks, but block_table has 2"),
        ({"seq_lens": np.zeros(8, np.int32)}, r"seq_lens\[0\] is 0, fewer than its query tokens, 1"),
        ({"query_start": np.zeros(9, np.int32)}, r"query_start must begin with 0 and end with .* 319"),
        ({"query": np.zeros((319, 5, 64), np.float32)}, r"must be float32 or uint16.*\[319, 5, 64\]"),
        ({"query": np.zeros((319, 6, 64), np.float64)}, r"query must be .* but is float64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused_by_name(change: dict[str, NDArray[Any]], message: str) -> None:
    case = Case(MIXED)
    out = np.zeros(case.query.shape, np.float32)
    case.__dict__.update(change)
    with pytest.raises(ValueError, match=message):
        case.run(out)


@pytest.mark.parametrize("from_bf16", [False, True])
@pytest.mark.parametrize("to_bf16", [False, True])
def test_write_kv_puts_each_token_in_its_slot_and_skips_minus_one(level: str, from_bf16: bool, to_bf16: bool) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=(5, 3, 24)).astype(np.float32) for _ in range(2)]
    key, value = [reference.narrow(x) if from_bf16 else x for x in rows]
    slots = np.array([3, -1, 40, 16, 47], np.int64)
    kind = np.uint16 if to_bf16 else np.float32
    caches = [np.full((3, 3, BLOCK, 24), 7, kind) for _ in range(4)]
    tokring_kernels.write_kv(key, value, *caches[:2], slots)
    reference.write_kv(key, value, *caches[2:], slots)
    assert np.array_equal(caches[0], caches[2]) and np.array_equal(caches[1], caches[3])


@pytest.mark.parametrize("from_bf16", [False, True])
def test_write_kv_to_an_int8_cache_leaves_codes_and_scales(level: str, from_bf16: bool) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=(5, 3, 24)).astype(np.float32) * np.float32(10.0 ** rng.integers(-9, 9)) for _ in range(2)]
    rows[0][1, 2] = 0.0
    key, value = [reference.narrow(x) if from_bf16 else x for x in rows]
    slots = np.array([3, 19, 40, -1, 47], np.int64)
    caches = [np.full((3, 3, BLOCK, 24), 7, np.int8) for _ in range(4)]
    scales = [np.full((3, 3, BLOCK), 7, np.float32) for _ in range(4)]
    tokring_kernels.write_kv(key, value, *caches[:2], slots, key_scale=scales[0], value_scale=scales[1])
    reference.write_kv(key, value, *caches[2:], slots, key_scale=scales[2], value_scale=scales[3])
    assert np.array_equal(caches[0], caches[2]) and np.array_equal(caches[1], caches[3])
    assert np.array_equal(scales[0], scales[2]) and np.array_equal(scales[1], scales[3])


def test_a_vector_with_nan_or_infinity_spoils_its_scale_in_an_int8_cache(level: str) -> None:
    rows = np.ones((2, 1, 8), np.float32)
    rows[0, 0, 3], rows[1, 0, 5] = np.nan, np.inf
    caches, scales = np.ones((2, 1, 1, BLOCK, 8), np.int8), np.zeros((2, 1, 1, BLOCK), np.float32)
    tokring_kernels.write_kv(rows, rows, *caches, np.arange(2), key_scale=scales[0], value_scale=scales[1])
    assert np.isnan(scales[..., :2]).all()


def test_scales_come_with_int8_caches_and_no_others() -> None:
    case = Case(MIXED, int8=True)
    case.options = {}
    with pytest.raises(ValueError, match="an int8 cache needs key_scale and value_scale"):
        case.run()
    scale = np.zeros((1, 1, BLOCK), np.float32)
    case = Case(MIXED, options={"key_scale": scale, "value_scale": scale})
    with pytest.raises(ValueError, match="only an int8 cache takes key_scale, value_scale"):
        case.run()


def test_write_kv_refuses_a_slot_beyond_the_cache() -> None:
    rows, cache = np.zeros((1, 1, 8), np.float32), np.zeros((2, 1, BLOCK, 8), np.float32)
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is 32, beyond the cache's 32 slots"):
        tokring_kernels.write_kv(rows, rows, cache, cache.copy(), np.array([32], np.int64))
