"""SpecialSteps: the part of a step that rules, grammars and logprobs ask for, between the model and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tokring.engine.cuda.backend import Device
from tokring.engine.cuda.rules import RuleState
from tokring.engine.cuda.step_buffer import StepBuffer
from tokring.engine.special_draw import FoundLogprobs, SpecialDraw
from tokring_kernels.cuda.ops import CudaOps

Int32 = NDArray[np.int32]
NUM_RULE_ARRAYS = 2


class LogprobEntries:
    """Where the entries of LogprobsWanted find their logits: in the step's, or in copies made before rules change them.

    Those with copies come last: `order` is the place of each among the entries that were asked for.
    """

    def __init__(self, special: SpecialDraw, sample_lanes: Int32, sample_rows: Int32) -> None:
        wanted = special.logprobs
        rows = wanted.rows if wanted is not None else _NONE
        token_ids = wanted.token_ids if wanted is not None else _NONE
        num_samples = len(sample_lanes)
        is_changed = np.zeros(num_samples, np.bool_)
        if special.ruled is not None:
            is_changed[special.ruled.samples] = True
        is_changed[special.masked] = True
        samples = np.minimum(rows, num_samples - 1)
        of_sample = rows < num_samples
        lanes, logits_rows, changed = np.zeros(len(rows), np.int32), rows.copy(), np.zeros(len(rows), np.bool_)
        if num_samples:
            lanes = np.where(of_sample, sample_lanes[samples], 0).astype(np.int32)
            logits_rows = np.where(of_sample, sample_rows[samples], rows).astype(np.int32)
            changed = of_sample & is_changed[samples]
        self.width = wanted.width if wanted is not None else 0
        self.order = np.concatenate((np.flatnonzero(~changed), np.flatnonzero(changed)))
        self.num_plain = int(np.count_nonzero(~changed))
        self.copied_rows, places = np.unique(logits_rows[changed], return_inverse=True)
        entries = np.concatenate((logits_rows[~changed], places.astype(np.int32)))
        self.arrays: list[Int32] = [entries, token_ids[self.order], lanes[self.order], self.copied_rows]


class SpecialStep:
    """One step's part; `arrays` has to be sent, and receive() be told of it unless all are empty."""

    def __init__(
        self, steps: SpecialSteps, special: SpecialDraw, sample_lanes: Int32, sample_rows: Int32, *, row_is_lane: bool
    ) -> None:
        """Sample i is of lane sample_lanes[i], its logits are row sample_rows[i]."""
        self._steps = steps
        self._special = special
        self._sample_rows = sample_rows
        self.changes_logits = special.ruled is not None or special.masks is not None
        rules = [_NONE] * NUM_RULE_ARRAYS
        if special.ruled is not None:
            rules = steps.rules.plan(special.ruled, sample_lanes)
        rows_by_lane = _NONE
        if special.ruled is not None and not row_is_lane:
            rows_by_lane = np.full(steps.num_lanes, -1, np.int32)
            rows_by_lane[sample_lanes] = sample_rows
        self.logprobs = LogprobEntries(special, sample_lanes, sample_rows)
        self.arrays: list[Int32] = [*rules, rows_by_lane, *self.logprobs.arrays]
        self._rows_by_lane: torch.Tensor | None = None
        self._entries = self._token_ids = self._lanes = self._copied_rows = steps.nothing
        self._copies = steps.nothing
        self.found: torch.Tensor | None = None  # logprob float32[n], rank[n], top ids [n, width], their logprobs

    def receive(self, sent: Sequence[torch.Tensor]) -> None:
        """The arrays, on the device."""
        self._steps.rules.receive(sent[:NUM_RULE_ARRAYS])
        rows_by_lane, self._entries, self._token_ids, self._lanes, self._copied_rows = sent[NUM_RULE_ARRAYS:]
        self._rows_by_lane = rows_by_lane if len(rows_by_lane) else None

    def change(self, logits: torch.Tensor, lanes: torch.Tensor | None, lengths: torch.Tensor) -> None:
        """Apply rules and masks to the logits of samples; lanes: those of the rows, None: row i is lane i's."""
        if len(self._copied_rows):
            self._copies = logits.index_select(0, self._copied_rows.long())
        if self._special.ruled is not None:
            self._steps.rules.apply(logits, lanes, self._rows_by_lane, lengths)
        if self._special.masks is not None:
            self._steps.apply_masks(logits, self._sample_rows[self._special.masked], self._special.masks())

    def note(self, sampled: torch.Tensor, lengths: torch.Tensor) -> None:
        """Count what was drawn; lengths int32[R] by lane, without it."""
        if self._special.ruled is not None:
            self._steps.rules.note_sampled(sampled, lengths)

    def find_logprobs(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        """Behind the samples: `found`, if it is wanted."""
        count, width = len(self._entries), self.logprobs.width
        if not count:
            return
        drawn = sampled.index_select(0, self._lanes.long())
        chosen = torch.where(self._token_ids < 0, drawn, self._token_ids)
        self.found = torch.empty(count * (2 + 2 * width), dtype=torch.int32, device=logits.device)
        parts = split_logprobs(self.found, count, width)
        num_bytes = self._steps.ops.sample_workspace_bytes(count)
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=logits.device)
        cut = self.logprobs.num_plain
        for rows, start, stop in ((logits, 0, cut), (self._copies, cut, count)):
            if start < stop:
                logprob, rank, top_id, top_logprob = (part[start:stop] for part in parts)
                self._steps.ops.logprobs(
                    rows, chosen[start:stop], logprob.view(torch.float32), rank, top_id,
                    top_logprob.view(torch.float32), workspace, entries=self._entries[start:stop],
                )  # fmt: skip

    def answer(self, found: Int32) -> FoundLogprobs:
        """`found`, copied to the host, in the order in which it was asked for."""
        parts = split_logprobs(found, len(self.logprobs.order), self.logprobs.width)
        back = np.argsort(self.logprobs.order)
        logprob, rank, top_id, top_logprob = (part[back] for part in parts)
        return FoundLogprobs(logprob.view(np.float32), rank, top_id, top_logprob.view(np.float32))


class SpecialSteps:
    """What all of them share."""

    def __init__(self, device: Device, ops: CudaOps, num_lanes: int, vocab_size: int) -> None:
        self.ops = ops
        self.num_lanes = num_lanes
        self.rules = RuleState(device, ops, num_lanes, vocab_size)
        self.nothing = torch.empty(0, dtype=torch.int32, device=device.torch_device)
        self._device = device
        self._masks: StepBuffer | None = None

    def apply_masks(self, logits: torch.Tensor, rows: Int32, masks: NDArray[np.uint32]) -> None:
        """Forbid what the grammars forbid; their masks come when the step's other arrays have long been sent."""
        if self._masks is None:
            self._masks = StepBuffer(self._device, 2 * masks.size)
        sent_rows, words = self._masks.send([rows, masks.view(np.int32)])
        self.ops.apply_bitmask(logits, words.view(masks.shape), sent_rows)


Flat = TypeVar("Flat", torch.Tensor, Int32)


def split_logprobs(found: Flat, count: int, width: int) -> tuple[Flat, Flat, Flat, Flat]:
    """Logprobs [n], ranks [n], ids [n, width] and their logprobs [n, width] of the one array that holds them."""
    middle = count * (2 + width)
    return (
        found[:count],
        found[count : 2 * count],
        found[2 * count : middle].reshape(count, width),
        found[middle:].reshape(count, width),
    )


_NONE = np.zeros(0, np.int32)
