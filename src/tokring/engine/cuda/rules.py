"""RuleState: penalties, bias, bans and allowed ids of running requests on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.cuda.backend import Device
from tokring.engine.request import LONGEST_LOOKED_UP, Request
from tokring.engine.special_draw import RuledSample
from tokring_kernels.cuda.ops import TAIL, CudaOps

Int32 = NDArray[np.int32]
NO_SLOT = -1
assert LONGEST_LOOKED_UP == TAIL + 1


@dataclass(slots=True)
class Resident:
    """A request whose tokens so far are counted on the device, in a slot."""

    slot: int
    num_tokens: int  # as many will be counted once the last step launched has been executed
    has_long_words: bool  # LogitRules.has_long_words


class TokenState(NamedTuple):
    """What of a request's part of the table depends on its tokens."""

    holds_back: bool  # its stop ids are forbidden still: min_tokens
    completing: tuple[int, ...]  # last tokens of long bad words whose other tokens have just been written


class RuleTable:
    """Bias, bans and allowed ids as flat arrays by lane. They stay on the device until who is in it changes."""

    def __init__(
        self, samples: Sequence[RuledSample], lanes: Sequence[int], states: Sequence[TokenState], vocab_size: int
    ) -> None:
        bias: list[tuple[Int32, Int32, NDArray[np.float32]]] = []  # lanes, ids, what is added
        words: list[Int32] = []
        word_lanes: list[int] = []
        masks: list[NDArray[np.uint32]] = []
        mask_lanes: list[int] = []

        def forbid(lane: int, ids: Int32) -> None:
            bias.append((np.full(len(ids), lane, np.int32), ids, np.full(len(ids), -np.inf, np.float32)))

        for sample, lane, state in zip(samples, lanes, states, strict=True):
            rules = sample.rules
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


def token_state(sample: RuledSample, *, has_long_words: bool) -> TokenState:
    """Of a request's tokens so far; all of them are known if it has long words (Request.needs_tokens)."""
    rules, tokens = sample.rules, sample.token_ids
    completing: tuple[int, ...] = ()
    if has_long_words:
        completing = tuple(
            int(word[-1])
            for word in rules.bad_words
            if LONGEST_LOOKED_UP < len(word) <= len(tokens) + 1 and np.array_equal(tokens[1 - len(word) :], word[:-1])
        )
    return TokenState(len(tokens) < rules.min_total, completing)


class RuleState:
    """What rules need on the device, kept from step to step; only what changes is sent.

    By lane: slot (-1: no rules), repetition, presence and frequency penalty, in an arena of their own. By slot: how
    often each token occurred, and the latest tokens. Slots belong to requests, which keep them when they change lanes.
    A request is counted anew where its length is not what the device has counted: it has just joined, or its last
    token was sampled on the host.
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
        self._table = zeros(0)
        self._table_parts: list[torch.Tensor] = []
        # The host's mirror
        self._columns = np.zeros((4, num_lanes), np.int32)
        self._columns[0] = NO_SLOT
        self._residents: dict[Request, Resident] = {}
        self._free_slots = list(range(num_lanes - 1, -1, -1))
        self._table_of: list[tuple[int, Request, TokenState]] = []  # who is in the table
        self._table_slices: list[slice] = []
        # This step
        self._has_penalties = False
        self._sent: list[torch.Tensor] = []

    def plan(self, ruled: Sequence[RuledSample], sample_lanes: Int32) -> list[Int32]:
        """These samples have rules; returns what has to be sent for them: all empty if nothing changed."""
        lanes = sample_lanes[[sample.sample for sample in ruled]].tolist()
        joining = [sample for sample in ruled if not self._is_counted(sample)]
        self._seat(joining, ruled)
        columns = np.zeros((4, self._num_lanes), np.int32)
        columns[0] = NO_SLOT
        penalties = columns[1:].view(np.float32)
        self._has_penalties = False
        for sample, lane in zip(ruled, lanes, strict=True):
            resident, rules = self._residents[sample.request], sample.rules
            resident.num_tokens = len(sample.token_ids) + 1
            columns[0, lane] = resident.slot
            penalties[:, lane] = rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty
            self._has_penalties |= rules.has_penalties
        changed = (columns != self._columns).reshape(-1).nonzero()[0].astype(np.int32)
        pairs = np.empty(1 + 2 * len(changed) if len(changed) else 0, np.int32)
        if len(changed):
            pairs[0], pairs[1::2], pairs[2::2] = len(changed), changed, columns.reshape(-1)[changed]
            self._columns = columns
        return [pairs, *self._histories(joining), self._new_table(ruled, lanes)]

    def receive(self, sent: Sequence[torch.Tensor]) -> None:
        """What plan() returned, on the device."""
        pairs, slots, num_prompt, num_tokens, token_ids, tails, table = sent
        if len(pairs):
            self._ops.scatter_metadata(self._arena, pairs)
        if len(slots):
            histories = token_ids.view(len(slots), -1)
            self._ops.count_history(self._counts, slots, histories, num_prompt, num_tokens)
            self._tails.index_copy_(0, slots.long(), tails.view(-1, TAIL))
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

    def _is_counted(self, sample: RuledSample) -> bool:
        resident = self._residents.get(sample.request)
        return resident is not None and resident.num_tokens == len(sample.token_ids)

    def _seat(self, joining: Sequence[RuledSample], ruled: Sequence[RuledSample]) -> None:
        """Give them slots, if need be of requests that don't sample: should these come back, they join again."""
        for sample in joining:
            if sample.request in self._residents:
                continue
            if not self._free_slots:
                present = {other.request for other in ruled}
                for request in [request for request in self._residents if request not in present]:
                    self._free_slots.append(self._residents.pop(request).slot)
            self._residents[sample.request] = Resident(self._free_slots.pop(), 0, sample.rules.has_long_words)

    def _histories(self, joining: Sequence[RuledSample]) -> list[Int32]:
        """Slots, prompt lengths, lengths, tokens [n, longest] and tails [n, TAIL] of those that join, flat."""
        if not joining:
            return [_NONE] * 5
        lengths = np.array([len(sample.token_ids) for sample in joining], np.int32)
        token_ids = np.zeros((len(joining), int(lengths.max())), np.int32)
        tails = np.zeros((len(joining), TAIL), np.int32)
        for i, sample in enumerate(joining):
            tokens = sample.token_ids
            if tokens[-1] < 0:
                raise RuntimeError("a request with rules joins behind a token that is not known")
            token_ids[i, : len(tokens)] = tokens
            positions = np.arange(max(0, len(tokens) - TAIL), len(tokens))
            tails[i, positions % TAIL] = tokens[positions]
        slots = np.array([self._residents[sample.request].slot for sample in joining], np.int32)
        num_prompt = np.array([sample.request.num_prompt for sample in joining], np.int32)
        return [slots, num_prompt, lengths, token_ids.reshape(-1), tails.reshape(-1)]

    def _new_table(self, ruled: Sequence[RuledSample], lanes: Sequence[int]) -> Int32:
        """The table, if who is in it, or what depends on their tokens, has changed; else empty."""
        states = [
            token_state(sample, has_long_words=self._residents[sample.request].has_long_words) for sample in ruled
        ]
        who = [(lane, sample.request, state) for sample, lane, state in zip(ruled, lanes, states, strict=True)]
        if who == self._table_of:
            return _NONE
        self._table_of = who
        parts = RuleTable(ruled, lanes, states, self._vocab_size).arrays
        ends = np.cumsum([len(part) for part in parts]).tolist()
        self._table_slices = [slice(end - len(part), end) for end, part in zip(ends, parts, strict=True)]
        return np.concatenate(parts)


def _joined(parts: Sequence[NDArray[np.generic]]) -> Int32:
    """One flat array of their 32-bit words."""
    return np.concatenate([np.ascontiguousarray(part).view(np.int32) for part in parts]) if parts else _NONE


_NONE = np.zeros(0, np.int32)
