"""StepColumns against the same in numpy, written down plainly."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokring_kernels import BlockPool, RowStore, StepColumns, sha256_chain

MAX_ROWS = 5
BLOCK_SIZE = 4
MAX_LENGTH = 16
MAX_TOKENS = 40
ROWS = ("num_tokens", "num_computed", "num_scheduled", "last_token", "max_total", "num_blocks")


class Columns:
    """Random columns, and the native object that borrows them."""

    def __init__(self, random: np.random.Generator) -> None:
        self.by_row = {name: np.zeros(MAX_ROWS, np.int32) for name in ROWS}
        self.first_token_ns = random.integers(0, 2, MAX_ROWS).astype(np.int64)
        self.token_base = random.permutation(MAX_ROWS).astype(np.int64) * (MAX_LENGTH + 1)
        self.token_ids = random.integers(0, 50, MAX_ROWS * (MAX_LENGTH + 1), dtype=np.int32)
        self.stop_ids = random.integers(0, 50, (8, MAX_ROWS), dtype=np.int32)
        self.block_ids = random.permutation(100)[: MAX_ROWS * 4].reshape(MAX_ROWS, 4).astype(np.int32)
        self.by_row["num_tokens"][:] = random.integers(1, MAX_LENGTH, MAX_ROWS)
        self.by_row["num_computed"][:] = random.integers(0, self.by_row["num_tokens"])
        self.by_row["num_blocks"][:] = -(-self.by_row["num_tokens"] // BLOCK_SIZE)
        self.by_row["max_total"][:] = random.integers(self.by_row["num_tokens"], MAX_LENGTH + 1)
        self.step_rows = np.zeros((7, MAX_ROWS + 1), np.int32)
        self.step_tokens = np.zeros((2, MAX_TOKENS), np.int32)
        self.slot_mapping = np.zeros(MAX_TOKENS, np.int64)
        self.native = StepColumns(
            **self.by_row,
            token_base=self.token_base,
            first_token_ns=self.first_token_ns,
            token_ids=self.token_ids,
            stop_ids=self.stop_ids,
            block_ids=self.block_ids,
            block_size=BLOCK_SIZE,
            step_rows=self.step_rows,
            step_tokens=self.step_tokens,
            slot_mapping=self.slot_mapping,
        )

    def tokens(self, row: int) -> np.ndarray:
        base = self.token_base[row]
        return self.token_ids[base : base + self.by_row["num_tokens"][row]]


def test_a_row_store_writes_and_moves_one_row_of_all_its_matrices():
    random = np.random.default_rng(1)
    matrices = [
        random.integers(0, 99, (3, MAX_ROWS)),
        random.integers(0, 99, (2, MAX_ROWS), dtype=np.int32),
        random.random((2, MAX_ROWS), np.float32),
    ]
    expected = [matrix.copy() for matrix in matrices]
    store = RowStore(matrices, [-1, -1, 8, -1, 4, 0, -1])
    values = [np.array([-1, 2**40, 3]), np.array([4, -5], np.int32), np.array([0.5, 0.25], np.float32)]
    record = struct.pack("<fiq", 0.5, -5, 3)
    store.put(1, record, (-1, 2**40, 4, 0.25))
    store.move(4, 2)
    for matrix, value in zip(expected, values, strict=True):
        matrix[:, 1], matrix[:, 2] = value, matrix[:, 4]
    assert all(np.array_equal(is_, should) for is_, should in zip(matrices, expected, strict=True))
    for call in (
        lambda: store.put(1, record, (1, 2)),
        lambda: store.put(1, record[:-1], (0,) * 4),
        lambda: store.put(MAX_ROWS, record, (0,) * 4),
        lambda: store.move(-1, 0),
        lambda: store.put(1, record, (0, 0, 2**31, 0.0)),
        lambda: RowStore(matrices, [-1] * 6),
    ):
        with pytest.raises(ValueError, match="row|values|32 bits|record"):
            call()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_build_lists_the_scheduled_tokens_row_by_row(seed):
    random = np.random.default_rng(seed)
    columns = Columns(random)
    computed, total = columns.by_row["num_computed"], columns.by_row["num_tokens"]
    scheduled = columns.by_row["num_scheduled"]
    scheduled[:] = np.minimum(random.integers(0, 8, MAX_ROWS), total - computed)
    rows = np.flatnonzero(scheduled)
    num_requests, num_tokens, num_samples = columns.native.build(MAX_ROWS)
    assert (num_requests, num_tokens) == (len(rows), scheduled.sum())
    positions = [p for row in rows for p in range(computed[row], computed[row] + scheduled[row])]
    of_row = np.repeat(rows, scheduled[rows])
    assert columns.step_tokens[1, :num_tokens].tolist() == positions
    assert columns.step_tokens[0, :num_tokens].tolist() == [
        columns.tokens(r)[p] for r, p in zip(of_row, positions, strict=True)
    ]
    assert columns.slot_mapping[:num_tokens].tolist() == [
        columns.block_ids[r, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for r, p in zip(of_row, positions, strict=True)
    ]
    ends = np.cumsum(scheduled[rows])
    samples = np.flatnonzero((computed + scheduled)[rows] == total[rows])
    assert columns.step_rows[0, :num_requests].tolist() == rows.tolist()
    assert columns.step_rows[3, : num_requests + 1].tolist() == [0, *ends.tolist()]
    assert columns.step_rows[4, :num_requests].tolist() == (computed + scheduled)[rows].tolist()
    assert columns.step_rows[5, :num_samples].tolist() == samples.tolist()
    assert columns.step_rows[6, :num_samples].tolist() == (ends[samples] - 1).tolist()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_plan_schedules_those_that_lack_one_token_unless_held(seed):
    random = np.random.default_rng(seed)
    columns = Columns(random)
    held = random.random(MAX_ROWS) < 0.3
    wanted = np.where(held, 0, columns.by_row["num_tokens"] - columns.by_row["num_computed"])
    assert columns.native.plan(MAX_ROWS, held) == ((wanted == 1).sum(), np.flatnonzero(wanted > 1).tolist())
    assert columns.by_row["num_scheduled"].tolist() == (wanted == 1).tolist()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_advance_counts_a_step_as_computed_and_resolve_says_what_it_sampled(seed):
    random = np.random.default_rng(seed)
    columns = Columns(random)
    computed, total, limit = (columns.by_row[name] for name in ("num_computed", "num_tokens", "max_total"))
    scheduled = columns.by_row["num_scheduled"]
    scheduled[:] = np.minimum(random.integers(0, 8, MAX_ROWS), total - computed)
    expected_computed, before = computed + scheduled, [columns.tokens(row).tolist() for row in range(MAX_ROWS)]
    columns.native.build(MAX_ROWS)
    rows = np.flatnonzero((scheduled > 0) & (expected_computed == total)).astype(np.int32)
    lengths = columns.native.advance()
    assert lengths.tolist() == [len(before[row]) for row in rows]
    full = [row for row in rows if len(before[row]) + 1 >= limit[row]]
    expected_computed[full] += 1
    assert computed.tolist() == expected_computed.tolist()
    assert [columns.tokens(row)[-1] for row in rows] == list(range(-1, -1 - len(rows), -1))

    token_ids = random.integers(-1, 50, len(rows)).astype(np.int32)
    lacked_first = columns.first_token_ns == 0
    total[rows] += 1  # as if another step had been launched
    ended, num_silent = columns.native.resolve(rows, lengths, token_ids, 2, 77)
    assert ended == [
        i
        for i, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
        if token_id < 0 or row in full or token_id in columns.stop_ids[:2, row]
    ]
    assert num_silent == (token_ids < 0).sum()
    assert (columns.first_token_ns[rows][lacked_first[rows]] == 77).all()
    for i, row in enumerate(rows):
        assert columns.tokens(row)[: lengths[i] + 1].tolist() == [*before[row], token_ids[i]]
        assert columns.by_row["last_token"][row] == token_ids[i]
        assert total[row] == lengths[i] + (1 if i in ended else 2)
        assert i not in ended or computed[row] <= lengths[i]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_resolve_without_lengths_is_advance_and_resolve(seed):
    outcomes = []
    for at_once in (False, True):
        random = np.random.default_rng(seed)
        columns = Columns(random)
        total, computed = columns.by_row["num_tokens"], columns.by_row["num_computed"]
        scheduled = columns.by_row["num_scheduled"]
        scheduled[:] = np.minimum(random.integers(0, 8, MAX_ROWS), total - computed)
        columns.native.build(MAX_ROWS)
        rows = np.flatnonzero((scheduled > 0) & (computed + scheduled == total)).astype(np.int32)
        token_ids = random.integers(-1, 50, len(rows)).astype(np.int32)
        lengths = None if at_once else columns.native.advance()
        resolved = columns.native.resolve(rows, lengths, token_ids, 2, 77)
        tokens = [columns.tokens(row).tolist() for row in range(MAX_ROWS)]
        outcomes.append((resolved, tokens, {name: column.tolist() for name, column in columns.by_row.items()}))
    assert outcomes[0] == outcomes[1]


def test_rows_that_do_not_sample_in_the_step_built_last_have_no_lengths():
    columns = Columns(np.random.default_rng(0))
    with pytest.raises(ValueError, match="step built last"):
        columns.native.resolve(np.array([0], np.int32), None, np.array([1], np.int32), 0, 1)


def test_a_row_gets_the_cached_beginning_of_its_chain_and_new_blocks_or_nothing():
    columns, pool = Columns(np.random.default_rng(0)), BlockPool(6)
    columns.by_row["num_blocks"][:] = 0
    chain = bytes(range(96))
    assert columns.native.admit(0, pool, chain, 3, 4, 0) == 0
    columns.native.insert(0, pool, chain, 0, 2)
    assert columns.native.admit(1, pool, chain, 1, 3, 0) == 1
    assert columns.block_ids[1, 0] == columns.block_ids[0, 0] and pool.num_free == 0
    before = pool.references.tolist()
    assert columns.native.admit(2, pool, chain, 3, 3, 0) == -1
    assert columns.native.admit(2, pool, chain, 2, 2, 1) == -1  # two hits cost nothing, but one must stay free
    assert (pool.references.tolist(), columns.by_row["num_blocks"].tolist()) == (before, [4, 3, 0, 0, 0])
    assert columns.native.admit(2, pool, chain, 2, 2, 0) == 2
    for arguments in ((0, pool, chain, 0, 1, 0), (3, pool, chain, 2, 1, 0), (3, pool, chain, 0, 5, 0)):
        with pytest.raises(ValueError, match="row that has blocks|max_hits"):
            columns.native.admit(*arguments)
    with pytest.raises(ValueError, match="fewer digests"):
        columns.native.insert(0, pool, chain, 0, 4)


def test_a_row_that_leaves_gives_its_blocks_back_and_its_place_to_the_last():
    columns, pool = Columns(np.random.default_rng(0)), BlockPool(12)
    columns.by_row["num_blocks"][:] = 0
    for row, count in enumerate((3, 2, 4)):
        columns.native.admit(row, pool, b"", 0, count, 0)
    first, last = columns.block_ids[0, :3].tolist(), columns.block_ids[2].tolist()
    columns.native.leave(0, 2, pool)
    assert columns.by_row["num_blocks"].tolist() == [4, 2, 0, 0, 0] and columns.block_ids[0].tolist() == last
    assert [pool.references[block] for block in first] == [0, 0, 0] and pool.num_free == 6
    columns.native.leave(1, 1, pool)
    assert columns.by_row["num_blocks"].tolist() == [4, 0, 0, 0, 0] and pool.num_free == 8
    columns.by_row["num_blocks"][1] = 1
    with pytest.raises(ValueError, match="a block table is wrong"):
        columns.native.leave(1, 1, pool)


def test_a_step_is_counted_once():
    columns = Columns(np.random.default_rng(0))
    columns.by_row["num_scheduled"][0] = columns.by_row["num_tokens"][0] - columns.by_row["num_computed"][0]
    columns.native.build(1)
    assert len(columns.native.advance()) == 1
    assert len(columns.native.advance()) == 0


@given(data=st.data(), block_size=st.integers(1, 40), use_instructions=st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_chain_is_the_sha256_of_each_block_and_the_digest_before_it(data, block_size, use_instructions):
    text = data.draw(st.binary(max_size=400))
    token_ids = np.frombuffer(text[: len(text) // 4 * 4], np.int32)
    num_tokens = data.draw(st.integers(0, len(token_ids)))
    previous = root = hashlib.sha256(text).digest()
    expected = []
    for start in range(0, num_tokens // block_size * block_size, block_size):
        previous = hashlib.sha256(previous + token_ids[start : start + block_size].tobytes()).digest()
        expected.append(previous)
    known = b"".join(expected[: data.draw(st.integers(0, len(expected)))])
    whole = b"".join(expected)
    assert sha256_chain(known, root, token_ids, num_tokens, block_size, use_instructions) == whole
    assert sha256_chain(whole, root, token_ids, 0, block_size, use_instructions) == whole


def test_grow_gives_every_row_its_blocks_or_changes_nothing():
    columns = Columns(np.random.default_rng(0))
    columns.by_row["num_tokens"][:] = [1, 5, 4, 9, 16]
    columns.by_row["num_computed"][:] = 0
    columns.by_row["num_blocks"][:] = [1, 1, 1, 0, 3]
    few, enough = BlockPool(4), BlockPool(5)
    assert not columns.native.grow(MAX_ROWS, few) and few.num_free == 4
    assert columns.by_row["num_blocks"].tolist() == [1, 1, 1, 0, 3]
    assert columns.native.grow(MAX_ROWS, enough) and enough.num_free == 0
    assert columns.by_row["num_blocks"].tolist() == [1, 2, 1, 3, 4]
    taken = [columns.block_ids[1, 1], *columns.block_ids[3, :3], columns.block_ids[4, 3]]
    assert sorted(taken) == list(range(5))


def test_a_row_with_nothing_left_to_compute_gets_no_block():
    columns = Columns(np.random.default_rng(0))
    columns.by_row["num_tokens"][:] = columns.by_row["num_computed"][:] = 5
    columns.by_row["num_blocks"][:] = 1
    assert columns.native.grow(MAX_ROWS, BlockPool(1))
    assert columns.by_row["num_blocks"].tolist() == [1] * MAX_ROWS


def test_a_schedule_that_the_columns_do_not_cover_is_refused():
    columns = Columns(np.random.default_rng(0))
    columns.by_row["num_scheduled"][0] = columns.by_row["num_tokens"][0] - columns.by_row["num_computed"][0] + 1
    with pytest.raises(ValueError, match="does not have"):
        columns.native.build(MAX_ROWS)
    one = np.array([1], np.int32)
    with pytest.raises(ValueError, match="no row"):
        columns.native.resolve(np.array([MAX_ROWS], np.int32), np.array([0]), one, 0, 1)
    with pytest.raises(ValueError, match="no such token"):
        columns.native.resolve(np.array([0], np.int32), columns.by_row["num_tokens"][:1].astype(np.int64), one, 0, 1)
