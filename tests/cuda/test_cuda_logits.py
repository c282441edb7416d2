"""What is done to logits before sampling equals the CPU kernels, bit for bit."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cuda.arrays import ACTIVATIONS, assert_near, int32, normal, widened

import tokring_kernels
from tokring_kernels import reference
from tokring_kernels.cuda.launcher import EmulatedLauncher
from tokring_kernels.cuda.ops import CudaOps

VOCAB = 5003  # more than one block's part of a row, no multiple of 4


@pytest.fixture
def ops(launcher: EmulatedLauncher) -> CudaOps:
    return CudaOps(launcher)


@pytest.mark.parametrize("kind", [*ACTIVATIONS, "f32"])
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_widen_logits_converts_and_caps(ops: CudaOps, kind: str, soft_cap: float) -> None:
    logits, out = normal(3, 701, kind=kind, scale=40), np.empty((3, 701), np.float32)
    ops.widen_logits(out, logits, soft_cap=soft_cap)
    expected = widened(logits)
    assert_near(out, soft_cap * np.tanh(expected / soft_cap) if soft_cap else expected, "f32")
    if kind == "f32":
        ops.widen_logits(logits, logits, soft_cap=soft_cap)
        np.testing.assert_array_equal(logits, out)


class History:
    """Counts of four requests in slots of a table, with tokens out of the vocabulary among theirs."""

    def __init__(self) -> None:
        self.token_ids = np.random.default_rng(0).integers(0, 60, (4, 80)).astype(np.int32)
        self.token_ids[:, ::7] = VOCAB
        self.token_ids[:, 3::11] = -1
        self.num_prompt, self.num_tokens = int32(30, 0, 50, 10), int32(80, 60, 50, 11)
        self.slots = int32(5, 0, -1, 3)
        self.counts = np.full((6, VOCAB), 12345, np.uint32)

    def expected_counts(self, request: int) -> NDArray[np.uint32]:
        ids = self.token_ids[request, : self.num_tokens[request]]
        prompt, output = np.split(ids, [self.num_prompt[request]])
        counts = 2 * np.bincount(output[(output >= 0) & (output < VOCAB)], minlength=VOCAB)
        counts[prompt[(prompt >= 0) & (prompt < VOCAB)]] |= 1
        return counts.astype(np.uint32)


def test_counts_of_history_and_of_sampled_tokens(ops: CudaOps) -> None:
    history = History()
    ops.count_history(history.counts, history.slots, history.token_ids, history.num_prompt, history.num_tokens)
    expected = np.full((6, VOCAB), 12345, np.uint32)
    for request in (0, 1, 3):
        expected[history.slots[request]] = history.expected_counts(request)
    np.testing.assert_array_equal(history.counts, expected)
    tails = np.full((6, 64), 77, np.int32)
    slots, lengths = int32(5, 0, -1, 3, 1, 2), int32(64, 5, 9, 63, 0, 7)
    ops.note_sampled(history.counts, tails, slots, lengths, int32(9, -2, 9, VOCAB - 1, 9, VOCAB))
    expected[5, 9] += 2
    expected[3, VOCAB - 1] += 2
    np.testing.assert_array_equal(history.counts, expected)
    assert tails[5, 0] == 9 and tails[3, 63] == VOCAB - 1 and (tails == 77).sum() == tails.size - 2


@pytest.mark.parametrize("rows", [None, int32(3, -1, 2, 0)])
def test_penalties_have_the_cpu_kernels_bits(ops: CudaOps, rows: NDArray[np.int32] | None) -> None:
    history = History()
    ops.count_history(history.counts, history.slots, history.token_ids, history.num_prompt, history.num_tokens)
    penalties = [
        np.array(values, np.float32) for values in ([1.3, 0.7, 2, 1.1], [0.3, -0.2, 1, 0], [0.1, 1.7, 1, -0.3])
    ]
    logits = normal(4, VOCAB, scale=5)
    expected = logits.copy()
    requests = np.arange(4, dtype=np.int32) if rows is None else rows
    used = np.flatnonzero((requests >= 0) & (history.slots[requests] >= 0)).astype(np.int32)
    chosen = requests[used]
    tokring_kernels.apply_penalties(
        expected,
        used,
        history.token_ids,
        chosen,
        history.num_prompt[chosen],
        history.num_tokens[chosen],
        *(values[chosen] for values in penalties),
    )
    ops.apply_penalties(logits, history.counts, history.slots, *penalties, rows=rows)
    np.testing.assert_array_equal(logits.view(np.uint32), expected.view(np.uint32))


def test_bias_is_added_and_forbids(ops: CudaOps) -> None:
    lanes, ids = int32(2, 0, -1, 2, 4, 1, 1), int32(49, 0, 7, 48, 7, 50, -1)  # the last three are outside
    for logits_rows in (None, int32(1, -1, 0, 2)):
        logits = normal(3, 50)
        expected = logits.copy()
        ops.apply_bias(
            logits, lanes, ids, np.array([-np.inf, 1.5, 9, -2, 9, 9, 9], np.float32), logits_rows=logits_rows
        )
        two, zero = (2, 0) if logits_rows is None else (0, 1)
        expected[two, 49], expected[two, 48] = -np.inf, expected[two, 48] - 2
        expected[zero, 0] += np.float32(1.5)
        np.testing.assert_array_equal(logits, expected)


def test_a_word_is_banned_where_it_would_be_completed(ops: CudaOps) -> None:
    """Lanes 0 to 2 end with 5 6 7 8, with 7 8 and with 8; lane 3 has no slot."""
    tails = np.full((4, 64), 77, np.int32)
    lengths, slots = int32(65, 2, 1, 9), int32(3, 0, 2, -1)
    tails[3, [61, 62, 63, 0]] = [5, 6, 7, 8]
    tails[0, :2] = [7, 8]
    tails[2, :1] = [8]
    words = {
        (7, 8, 9): 0,
        (8, 10): 0,
        (6, 7, 11): 0,
        (5, 6, 7, 8, 12): 0,
        (1, 5, 6, 7, 8, 13): 0,
        (14,): 1,
        (7, 8, 9, 2): 1,
        (8, 3): 2,
        (77, 4): 3,
        (*range(80, 145), 4): 0,
    }
    starts = np.cumsum([0, *map(len, words)]).astype(np.int32)
    flat = np.concatenate([np.array(word, np.int32) for word in words])
    lanes = np.array(list(words.values()), np.int32)
    for logits_rows in (None, int32(2, -1, 1, 0)):
        logits = normal(4, 20)
        expected = logits.copy()
        row = [0, 1, 2] if logits_rows is None else logits_rows
        expected[row[0], [9, 10, 11, 12]] = -np.inf, -np.inf, expected[row[0], 11], -np.inf
        if row[1] >= 0:
            expected[row[1], 14] = -np.inf
        expected[row[2], 3] = -np.inf
        ops.ban_words(logits, flat, starts, lanes, tails, slots, lengths, logits_rows=logits_rows)
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, VOCAB])
def test_a_bitmask_leaves_only_what_it_allows(ops: CudaOps, vocab_size: int) -> None:
    words = (vocab_size + 31) // 32
    mask = np.random.default_rng(vocab_size).integers(0, 2**32, (3, words + 1)).astype(np.uint32)[:, :words]
    for lanes, logits_rows in (
        (None, None),
        (int32(4, -1, 0), None),
        (int32(2, 1, 0), int32(3, -1, 1)),
    ):
        logits = normal(5, vocab_size)
        expected = logits.copy()
        rows: list[Any] = [0, 1, 2] if lanes is None else lanes.tolist()
        if logits_rows is not None:
            rows = [int(logits_rows[lane]) for lane in rows]
        for row, bits in zip(rows, mask, strict=True):
            if row >= 0:
                allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)
                expected[row, ~allowed] = -np.inf
        ops.apply_bitmask(logits, mask, lanes, logits_rows=logits_rows)
        np.testing.assert_array_equal(logits, expected)


def test_a_short_mask_is_refused(ops: CudaOps) -> None:
    with pytest.raises(ValueError, match="mask has 1 words a row, but 33 tokens need 2"):
        ops.apply_bitmask(normal(1, 33), np.zeros((1, 1), np.uint32))


def test_the_rules_in_the_engines_order_give_its_logits(ops: CudaOps) -> None:
    """Allowed ids, a banned word, stop ids, bias, penalties, grammar mask: as Sampler applies them to one row."""
    from tokring.engine.logit_rules import apply_rules
    from tokring.engine.request import LogitRules

    tokens, vocab_size = int32(4, 5, 6, 5, 6), 64
    rules = LogitRules(
        allowed_ids=np.arange(3, 50, dtype=np.int32),
        bad_words=(int32(5, 6, 9), int32(6, 5), int32(8)),
        min_total=9,
        stop_ids=int32(10, 11),
        bias_ids=int32(12, 60, 9),
        bias=np.array([2.5, 1, 1], np.float32),
    )
    logits = normal(1, vocab_size, scale=3)
    grammar = np.random.default_rng(1).integers(0, 2**32, (1, 2)).astype(np.uint32)
    expected = logits.copy()
    apply_rules(expected[0], rules, tokens)
    expected[0] = reference.apply_penalties(expected[0], tokens[:2], tokens[2:], 1.5, 0.25, 0.5)
    tokring_kernels.apply_bitmask(expected, grammar)

    ops.apply_bitmask(logits, tokring_kernels.bitmask_of(rules.allowed_ids, vocab_size)[None])
    tails = np.zeros((1, 64), np.int32)
    tails[0, :5] = tokens
    ops.ban_words(
        logits, int32(5, 6, 9, 6, 5, 8), int32(0, 3, 5, 6), int32(0, 0, 0), tails, int32(0), int32(len(tokens))
    )
    ids, bias = np.concatenate([rules.stop_ids, rules.bias_ids]), np.concatenate([np.full(2, -np.inf), rules.bias])
    ops.apply_bias(logits, np.zeros(5, np.int32), ids, bias.astype(np.float32))
    counts = np.zeros((1, vocab_size), np.uint32)
    ops.count_history(counts, int32(0), tokens[None], int32(2), int32(5))
    ops.apply_penalties(logits, counts, int32(0), *(np.array([x], np.float32) for x in (1.5, 0.25, 0.5)))
    ops.apply_bitmask(logits, grammar)
    np.testing.assert_array_equal(logits, expected)
