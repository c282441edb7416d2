"""RuleState: penalties, bias, bans and allowed ids of running requests on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.cuda.backend import Device
from tokring.engine.cuda.step_buffer import StepBuffer
from tokring.engine.request import LONGEST_LOOKED_UP, LogitRules, Request
from tokring.engine.special_draw import RuledSamples
from tokring_kernels.cuda.ops import TAIL, CudaOps

Int32 = NDArray[np.int32]
NO_SLOT = -1
MOST_HISTORY_WORDS = 1 << 20  # 4 MB of tokens in one copy; a step in which more is to be counted makes several
assert LONGEST_LOOKED_UP == TAIL + 1


class TokenState(NamedTuple):
    """What of a request's part of the table depends on its tokens."""

    holds_back: bool  # its stop ids are forbidden still: min_tokens
    completing: tuple[int, ...]  # last tokens of long bad words whose other tokens have just been written


class RuleTable:
    """Bias, bans and allowed ids as flat arrays by lane. They stay on the device until who is in it changes."""

    def __init__(
        self, requests: Sequence[Request], lanes: Sequence[int], states: Sequence[TokenState], vocab_size: int
    ) -> None:
        bias: list[tuple[Int32, Int32, NDArray[np.float32]]] = []  # lanes, ids, what is added
        words: list[Int32] = []
        word_lanes: list[int] = []
        masks: list[NDArray[np.uint32]] = []
        mask_lanes: list[int] = []

        def forbid(lane: int, ids: Int32) -> None:
            bias.append((np.full(len(ids), lane, np.int32), ids, np.full(len(ids), -np.inf, np.float32)))

        for request, lane, state in zip(requests, lanes, states, strict=True):
            rules = rules_of(request)
            if rules.allowed_ids is not None:
                masks.append(tokring_kernels.bitmask_of(rules.allowed_ids, vocab_size))
                mask_lanes.append(lane)
            for word in rules.bad_words:
                if len(word) <= LONGEST_LOOKED_UP:
                    words.append(word)
                    word_lanes.append(lane)
            if state.holds_back and rules.stop_ids is not None:
                forbid(lane, rules.stop_ids)
            if state.completing:
                forbid(lane, np.array(state.completing, np.int32))
            if rules.bias_ids is not None and rules.bias is not None:
                bias.append((np.full(len(rules.bias_ids), lane, np.int32), rules.bias_ids, rules.bias))
        self.arrays: list[Int32] = [
            *(_joined([part[i] for part in bias]) for i in range(3)),
            _joined(words),
            np.cumsum([0, *map(len, words)], dtype=np.int32),
            np.array(word_lanes, np.int32),
            _joined(masks),
            np.array(mask_lanes, np.int32),
        ]


def rules_of(request: Request) -> LogitRules:
    """Of a request that has some."""
    assert request.rules is not None
    return request.rules


def token_state(rules: LogitRules, num_tokens: int, tokens: Callable[[], Int32]) -> TokenState:
    """Of a request's tokens so far; all of them are known if it has long words (Request.needs_tokens)."""
    completing: tuple[int, ...] = ()
    if rules.has_long_words:
        written = tokens()
        completing = tuple(
            int(word[-1])
            for word in rules.bad_words
            if LONGEST_LOOKED_UP < len(word) <= num_tokens + 1
            and np.array_equal(written[num_tokens + 1 - len(word) :], word[:-1])
        )
    return TokenState(num_tokens < rules.min_total, completing)


def history_parts(lengths: Int32, most_words: int) -> list[NDArray[np.intp]]:
    """Entries [n] in groups that are sent as rows as wide as their longest: each within most_words, or alone."""
    order = np.argsort(-lengths, kind="stable")
    parts: list[NDArray[np.intp]] = []
    while len(order):
        row_words = int(lengths[order[0]]) + TAIL + 3
        count = max(1, most_words // row_words)
        parts.append(order[:count])
        order = order[count:]
    return parts


class RuleState:
    """What rules need on the device, kept from step to step; only what changes is sent.

    By lane: slot (-1: no rules), repetition, presence and frequency penalty, in an arena of their own. By slot: how
    often each token occurred, and the latest tokens. Slots belong to requests, which keep them when they change lanes.
    A request is counted anew where its length is not what the device has counted: it has just joined, or its last
    token was sampled on the host.

    The counts (4 * num_lanes * vocab_size bytes) are there from the start, also if nobody ever asks for penalties: what
    is taken only later would have to be kept free of KV cache all the same.
    """

    def __init__(self, device: Device, ops: CudaOps, num_lanes: int, vocab_size: int) -> None:
        self._device = device
        self._ops = ops
        self._num_lanes = num_lanes
        self._vocab_size = vocab_size

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device.torch_device)

        self._counts = zeros(num_lanes, vocab_size)
        self._tails = zeros(num_lanes, TAIL)
        self._arena = zeros(4 * num_lanes)
        self._arena[:num_lanes] = NO_SLOT
        self._slots = self._arena[:num_lanes]
        self._penalties = [
            self._arena[i * num_lanes : (i + 1) * num_lanes].view(torch.float32) for i in (1, 2, 3)
        ]  # repetition, presence, frequency
        self._histories = StepBuffer(device, MOST_HISTORY_WORDS + 32)  # 5 arrays at multiples of 4 words
        self._table = zeros(0)
        self._table_parts: list[torch.Tensor] = []
        # The host's mirror
        self._columns = np.zeros((4, num_lanes), np.int32)
        self._columns[0] = NO_SLOT
        self._slot_of: dict[Request, int] = {}
        self._counted = np.zeros(num_lanes, np.int32)  # by slot: tokens, once what was launched has been executed
        self._free_slots = list(range(num_lanes - 1, -1, -1))
        self._table_of: list[tuple[int, Request, TokenState]] = []  # who is in the table
        self._table_slices: list[slice] = []
        self._joining: tuple[RuledSamples, list[int]] | None = None  # to be counted before the rules are applied
        # The last step with rules; while the next one has the same, each a token longer, nothing has to be looked at
        self._requests: tuple[Request, ...] = ()
        self._lanes = self._lengths = self._min_totals = self._used_slots = _NONE
        self._has_penalties = self._has_long_words = False

    def plan(self, ruled: RuledSamples, sample_lanes: Int32) -> list[Int32]:
        """These samples have rules; returns what has to be sent for them: all empty if nothing changed."""
        lanes, lengths = sample_lanes[ruled.samples], ruled.num_tokens
        if self._goes_on(ruled, lanes):
            self._lengths = lengths
            self._counted[self._used_slots] += 1
            return [_NONE] * 2
        joining = self._seat(ruled)
        self._joining = (ruled, joining) if joining else None
        self._requests, self._lanes, self._lengths = ruled.requests, lanes, lengths
        rules = [rules_of(request) for request in ruled.requests]
        self._used_slots = np.array([self._slot_of[request] for request in ruled.requests], np.int32)
        self._counted[self._used_slots] = lengths + 1
        self._min_totals = np.array([each.min_total for each in rules], np.int32)
        self._has_penalties = any(each.has_penalties for each in rules)
        self._has_long_words = any(each.has_long_words for each in rules)
        columns = np.zeros((4, self._num_lanes), np.int32)
        columns[0] = NO_SLOT
        columns[0, lanes] = self._used_slots
        columns[1:].view(np.float32)[:, lanes] = np.array(
            [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in rules], np.float32
        ).T
        changed = (columns != self._columns).reshape(-1).nonzero()[0].astype(np.int32)
        pairs = np.empty(1 + 2 * len(changed) if len(changed) else 0, np.int32)
        if len(changed):
            pairs[0], pairs[1::2], pairs[2::2] = len(changed), changed, columns.reshape(-1)[changed]
            self._columns = columns
        return [pairs, self._new_table(ruled, lanes.tolist())]

    def _goes_on(self, ruled: RuledSamples, lanes: Int32) -> bool:
        """Whether these are the last step's, in the same lanes, each one token longer, and no ban depends on that."""
        lengths = ruled.num_tokens
        return (
            ruled.requests is self._requests
            and not self._has_long_words
            and np.array_equal(lengths, self._lengths + 1)
            and np.array_equal(lengths, self._counted[self._used_slots])
            and np.array_equal(lanes, self._lanes)
            and not (lengths == self._min_totals).any()
        )

    def receive(self, sent: Sequence[torch.Tensor]) -> None:
        """What plan() returned, on the device."""
        pairs, table = sent
        if len(pairs):
            self._ops.scatter_metadata(self._arena, pairs)
        if len(table):
            if len(table) > len(self._table):
                self._table = torch.empty(2 * len(table), dtype=torch.int32, device=self._device.torch_device)
            self._device.copy(self._table[: len(table)], table)
            self._table_parts = [self._table[part] for part in self._table_slices]

    def apply(
        self, logits: torch.Tensor, lanes: torch.Tensor | None, logits_rows: torch.Tensor | None, lengths: torch.Tensor
    ) -> None:
        """Change logits float32[m, V]: row i is that of lane lanes[i] or i; logits_rows by lane is the inverse.

        lengths int32[R]: tokens so far. In the order of the host's apply_rules, penalties last.
        """
        self._count_joining()
        bias_lanes, bias_ids, bias, words, word_starts, word_lanes, masks, mask_lanes = self._table_parts
        ops = self._ops
        if len(mask_lanes):
            ops.apply_bitmask(logits, masks.view(len(mask_lanes), -1), mask_lanes, logits_rows=logits_rows)
        if len(word_lanes):
            ops.ban_words(
                logits, words, word_starts, word_lanes, self._tails, self._slots, lengths, logits_rows=logits_rows
            )
        if len(bias_ids):
            ops.apply_bias(logits, bias_lanes, bias_ids, bias.view(torch.float32), logits_rows=logits_rows)
        if self._has_penalties:
            ops.apply_penalties(logits, self._counts, self._slots, *self._penalties, rows=lanes)

    def note_sampled(self, sampled: torch.Tensor, lengths: torch.Tensor) -> None:
        """Count what lanes that don't rest have drawn; lengths int32[R] without it."""
        self._ops.note_sampled(self._counts, self._tails, self._slots, lengths, sampled)

    def _seat(self, ruled: RuledSamples) -> list[int]:
        """Entries whose tokens have to be counted; all have slots then, some of them taken from requests that rest."""
        joining: list[int] = []
        for i, request in enumerate(ruled.requests):
            slot = self._slot_of.get(request)
            if slot is not None and self._counted[slot] == ruled.num_tokens[i]:
                continue
            joining.append(i)
            if slot is None:
                if not self._free_slots:
                    present = set(ruled.requests)
                    for other in [other for other in self._slot_of if other not in present]:
                        self._free_slots.append(self._slot_of.pop(other))
                self._slot_of[request] = self._free_slots.pop()
        return joining

    def _count_joining(self) -> None:
        """Send the tokens of those that plan() has found to join, and count them."""
        if self._joining is None:
            return
        ruled, joining = self._joining
        self._joining = None
        for i, part in enumerate(history_parts(ruled.num_tokens[joining], MOST_HISTORY_WORDS)):
            if i:  # the buffer's slots are meant for one copy a step
                self._device.event().wait()
            history = self._history(ruled, [joining[j] for j in part])
            slots, num_prompt, num_tokens, token_ids, tails = self._histories.send(history)
            self._ops.count_history(self._counts, slots, token_ids.view(len(slots), -1), num_prompt, num_tokens)
            self._tails.index_copy_(0, slots.long(), tails.view(-1, TAIL))

    def _history(self, ruled: RuledSamples, joining: Sequence[int]) -> list[Int32]:
        """Slots, prompt lengths, lengths, tokens [n, longest] and tails [n, TAIL] of some that join, flat."""
        lengths = ruled.num_tokens[joining]
        token_ids = np.zeros((len(joining), int(lengths.max())), np.int32)
        tails = np.zeros((len(joining), TAIL), np.int32)
        for i, entry in enumerate(joining):
            tokens = ruled.tokens_of(entry)
            if tokens[-1] < 0:
                raise RuntimeError("a request with rules joins behind a token that is not known")
            token_ids[i, : len(tokens)] = tokens
            positions = np.arange(max(0, len(tokens) - TAIL), len(tokens))
            tails[i, positions % TAIL] = tokens[positions]
        requests = [ruled.requests[entry] for entry in joining]
        slots = np.array([self._slot_of[request] for request in requests], np.int32)
        num_prompt = np.array([request.num_prompt for request in requests], np.int32)
        return [slots, num_prompt, lengths, token_ids.reshape(-1), tails.reshape(-1)]

    def _new_table(self, ruled: RuledSamples, lanes: Sequence[int]) -> Int32:
        """The table, if who is in it, or what depends on their tokens, has changed; else empty."""
        states = [
            token_state(rules_of(request), int(ruled.num_tokens[i]), partial(ruled.tokens_of, i))
            for i, request in enumerate(ruled.requests)
        ]
        who = list(zip(lanes, ruled.requests, states, strict=True))
        if who == self._table_of:
            return _NONE
        self._table_of = who
        parts = RuleTable(ruled.requests, lanes, states, self._vocab_size).arrays
        ends = np.cumsum([len(part) for part in parts]).tolist()
        self._table_slices = [slice(end - len(part), end) for end, part in zip(ends, parts, strict=True)]
        return np.concatenate(parts)


def _joined(parts: Sequence[NDArray[np.generic]]) -> Int32:
    """One flat array of their 32-bit words."""
    return np.concatenate([np.ascontiguousarray(part).view(np.int32) for part in parts]) if parts else _NONE


_NONE = np.zeros(0, np.int32)
