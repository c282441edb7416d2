"""Sampler: one token for every request whose sequence is computed to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.grammar_masks import GrammarEnd, GrammarMasks
from tokring.engine.logit_rules import apply_rules
from tokring.engine.model_runner import StepOutput
from tokring.engine.request import LogitRules, Request
from tokring.engine.request_columns import RequestColumns
from tokring.engine.special_draw import (
    FoundLogprobs,
    LogprobsWanted,
    NamedIds,
    PromptPart,
    RuledSamples,
    SpecialDraw,
)
from tokring.engine.step_batch import DrawColumns, StepBatch
from tokring.engine.step_in_flight import StepInFlight
from tokring_ipc import ErrorCode, FinishReason

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
_CACHED_SIZES = 16  # of batches, whose views are kept
_CONTRADICTION = (FinishReason.ERROR, ErrorCode.INVALID_REQUEST)


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of k tokens by the unchanged logits, each with its `width` most likely alternatives."""

    index: Int32  # [k] which of the step's sampled tokens; position in the prompt for prompt logprobs
    rank: Int32  # [k] 1 = most likely
    logprob: Float32  # [k]
    top_id: Int32  # [k, width], -1 beyond what the request asked for
    top_logprob: Float32  # [k, width]

    def replace_alternatives(self, entry: int, ids: Int32, logits: Float32, token_id: int) -> None:
        """Give an entry these ids in place of the most likely ones; logits[vocab_size], of which token_id was drawn."""
        log_sum = logits[token_id] - self.logprob[entry]
        self.top_id[entry, : len(ids)] = ids
        self.top_logprob[entry, : len(ids)] = logits[ids] - log_sum

    def where(self, mask: NDArray[np.bool_], place: Int32) -> Logprobs | None:
        """Only the entries of `mask`, their index replaced by place[index]; None if there are none."""
        if not mask.any():
            return None
        index = place[self.index[mask]]
        return Logprobs(index, self.rank[mask], self.logprob[mask], self.top_id[mask], self.top_logprob[mask])


@dataclass(slots=True)
class SampledTokens:
    """What one step brought forth; views valid until the next step."""

    rows: Int32  # [m] rows that sampled
    token_ids: Int32  # [m], -1 where nothing could be sampled
    finite: NDArray[np.bool_]  # [m] False: the logits held NaN, or nothing was left to choose from
    logprobs: Logprobs | None = None
    prompt_logprobs: Sequence[tuple[int, Logprobs]] = ()  # (row, of which)
    grammar_ends: dict[int, GrammarEnd] = field(default_factory=dict)  # requests that grammar or rules end, by index
    following: Int32 | None = None  # [d] what was sampled behind each drafted token; None: there were no drafts
    num_accepted: Int32 | None = None  # [m] drafts that became tokens in front of token_ids; None: no drafts
    # known once the tokens are accounted for
    num_silent: int = 0  # how many token_ids are -1
    ended: list[int] | None = None  # indices of those that end by length, an inline stop id or -1

    def where(self, mask: NDArray[np.bool_]) -> SampledTokens:
        """Only the sampled tokens of `mask`, without prompt logprobs."""
        kept = self.logprobs
        if kept is not None:
            place = np.cumsum(mask, dtype=np.int32) - 1
            kept = kept.where(mask[kept.index], place)
        token_ids = self.token_ids[mask]
        num_silent = int(np.count_nonzero(token_ids < 0))
        num_accepted = None if self.num_accepted is None else self.num_accepted[mask]
        return SampledTokens(
            self.rows[mask], token_ids, self.finite[mask], kept, num_accepted=num_accepted, num_silent=num_silent
        )


class Sampler:
    """Gathers sampling columns, applies what the few special rows ask for, and draws all tokens in one native call.

    Randomness is keyed on (seed, choice, position): a token depends on its request alone, not on the batch.
    """

    def __init__(self, columns: RequestColumns) -> None:
        self._columns = columns
        self._token_ids = np.zeros(columns.max_rows, np.int32)
        self._finite = np.zeros(columns.max_rows, np.bool_)
        self._position = np.zeros(columns.max_rows, np.int64)
        self._masks = GrammarMasks(columns.max_rows)
        self._ruled_key = (-1, b"")  # what these were found for: samples with rules, and whose they are
        self._ruled: tuple[Int32, tuple[Request, ...]] = (np.zeros(0, np.int32), ())
        self._all_rows = lru_cache(_CACHED_SIZES)(lambda num_rows: self._take(slice(0, num_rows)))
        self._outputs = lru_cache(_CACHED_SIZES)(lambda count: (self._token_ids[:count], self._finite[:count]))

    def begin(self, batch: StepBatch) -> None:
        """Start what can be done while the model runs."""
        columns = self._columns
        if not columns.num_special:
            return
        rows = batch.rows[batch.sample_index]
        requests = [(index, columns.requests[rows[index]]) for index in columns.is_special[rows].nonzero()[0].tolist()]
        self._masks.begin([(i, request, request.grammar) for i, request in requests if request.grammar is not None])

    def rows_of(self, batch: StepBatch) -> Int32:
        """Return the rows that sample, int32[m]; a view, if they are all there are."""
        columns = self._columns
        num_samples = len(batch.sample_index)
        return batch.rows[batch.sample_index] if num_samples < columns.num_rows else columns.arange[:num_samples]

    def is_drawn(self, batch: StepBatch, *, by_rules: bool) -> bool:
        """Whether a runner can draw the step's tokens: of columns alone, or of a SpecialDraw too."""
        return (by_rules or self._columns.num_special == 0) and batch.num_drafts is None

    @property
    def runs_ahead(self) -> bool:
        """Whether a step whose tokens the runner draws need not be waited for."""
        return self._columns.num_needing_tokens == 0

    def with_logprobs(self, rows: Int32) -> NDArray[np.intp]:
        """Return the indices of those of `rows` whose logprobs are wanted."""
        columns = self._columns
        return np.flatnonzero(columns.num_logprobs[rows] >= 0) if columns.num_with_logprobs else _NONE

    def draw_columns(self, rows: Int32) -> DrawColumns:
        """Return how a token is drawn for each of `rows`; views, if they are all there are."""
        chosen = self._columns.select(rows)
        draw_columns = self._all_rows(len(rows)) if isinstance(chosen, slice) else self._take(chosen)
        draw_columns.position[:] = self._columns.num_tokens[chosen]
        return draw_columns

    def _take(self, chosen: slice | NDArray[np.intp]) -> DrawColumns:
        columns = self._columns
        return DrawColumns(
            columns.temperature[chosen],
            columns.top_k[chosen],
            columns.top_p[chosen],
            columns.min_p[chosen],
            columns.seed[chosen],
            columns.choice[chosen],
            self._position[chosen] if isinstance(chosen, slice) else np.zeros(len(chosen), np.int64),
        )

    def sample(self, batch: StepBatch, rows: Int32, logits: Float32) -> SampledTokens:
        """Sample for `rows` from `logits` float32[len(batch.logits_index), vocab_size], which it overwrites."""
        columns = self._columns
        num_samples = len(rows)
        sampled = SampledTokens(rows, *self._outputs(num_samples))
        if batch.num_drafts is not None:
            num_drafts = int(batch.num_drafts.sum())
            sampled.following = self._sample_drafts(rows, batch.num_drafts, logits[-num_drafts:])
            logits = logits[:-num_drafts]
        if len(logits) > num_samples:
            sampled.prompt_logprobs = self._prompt_logprobs(batch, logits[num_samples:])
            logits = logits[:num_samples]
        wants_logprobs = self.with_logprobs(rows)
        raw_logits = logits[wants_logprobs] if len(wants_logprobs) else None
        if columns.num_special:
            self._apply_rules(rows, logits)
            self._masks.apply(logits)
        draw(logits, self.draw_columns(rows), sampled.token_ids, sampled.finite)
        if columns.num_special:
            self._silence_prompt_only(rows, sampled.token_ids)
            self._end_special(sampled, lambda index: bool((logits[index] == -np.inf).all()))
        if raw_logits is not None:
            sampled.logprobs = self._logprobs(raw_logits, wants_logprobs, rows, sampled.token_ids)
        return sampled

    def special_draw(self, batch: StepBatch, rows: Int32) -> SpecialDraw | None:
        """What `rows` ask for beyond columns, for a runner that draws by it; None: nothing."""
        columns = self._columns
        if not columns.num_special and not columns.num_with_logprobs:
            return None
        special = SpecialDraw(samples=self.with_logprobs(rows).astype(np.int32))
        if columns.num_special:
            special.ruled = self._ruled_samples(rows)
            special.masked = self._masks.indexes
            special.masks = self._masks.take if len(special.masked) else None
            special.prompts = self._prompt_parts(batch)
        self._want_logprobs(special, rows)
        return (
            special if special.ruled is not None or special.masks is not None or special.logprobs is not None else None
        )

    def _ruled_samples(self, rows: Int32) -> RuledSamples | None:
        columns = self._columns
        key = (columns.version, rows.tobytes())
        if key != self._ruled_key:
            special = columns.is_special[rows].nonzero()[0].tolist()
            chosen = [i for i in special if columns.requests[rows[i]].rules is not None]
            self._ruled = np.array(chosen, np.int32), tuple(columns.requests[rows[i]] for i in chosen)
            self._ruled_key = key
        samples, requests = self._ruled
        if not requests:
            return None
        chosen_rows = rows[samples]
        return RuledSamples(
            samples, requests, columns.num_tokens[chosen_rows], lambda i: columns.tokens(int(chosen_rows[i]))
        )

    def _prompt_parts(self, batch: StepBatch) -> list[PromptPart]:
        columns = self._columns
        parts: list[PromptPart] = []
        for index in np.flatnonzero(columns.is_special[batch.rows]).tolist():
            row = int(batch.rows[index])
            first, stop = columns.prompt_logits(row, int(batch.num_scheduled[index]))
            if first < stop:
                # The token at position p predicts the one at p + 1.
                positions = np.arange(first + 1, stop + 1, dtype=np.int32) + columns.num_computed[row]
                parts.append(PromptPart(row, positions, columns.requests[row].num_prompt_logprobs))
        return parts

    def _want_logprobs(self, special: SpecialDraw, rows: Int32) -> None:
        """Entries: those of samples, the ids that requests name for them, prompts."""
        columns = self._columns
        logits_rows, token_ids = [special.samples], [np.full(len(special.samples), -1, np.int32)]
        num_entries = len(special.samples)
        width = 0
        if num_entries:
            width = int(columns.num_logprobs[rows[special.samples]].max())
        if columns.num_special and num_entries:
            for entry, index in enumerate(special.samples.tolist()):
                ids = columns.requests[rows[index]].logprob_ids
                if ids is not None:
                    special.named_ids.append(NamedIds(entry, num_entries, ids))
                    logits_rows.append(np.full(len(ids), index, np.int32))
                    token_ids.append(ids)
                    num_entries += len(ids)
        row = len(rows)  # prompt logits lie behind the samples', request by request
        special.first_prompt_entry = num_entries
        for part in special.prompts:
            logits_rows.append(np.arange(row, row + len(part.positions), dtype=np.int32))
            token_ids.append(columns.tokens(part.row)[part.positions])
            width = max(width, part.num_wanted)
            row += len(part.positions)
            num_entries += len(part.positions)
        if num_entries:
            special.logprobs = LogprobsWanted(np.concatenate(logits_rows), np.concatenate(token_ids), width)

    def drawn(self, step: StepInFlight) -> SampledTokens:
        """Return what a runner has drawn for the step's rows (-1: gone since)."""
        output: StepOutput = step.result
        rows, special = step.rows, step.special
        sampled = SampledTokens(rows, output.token_ids, output.finite)
        if not step.runs_ahead:
            self._silence_prompt_only(rows, sampled.token_ids)
        if special is None:
            self._add_logprobs_of_logits(sampled, step.wanted_logits, output.logits)
            return sampled
        if special.masks is not None or special.ruled is not None:
            nothing_left = output.nothing_left
            assert nothing_left is not None
            self._end_special(sampled, lambda index: bool(nothing_left[index]))
        if output.logprobs is not None:
            sampled.logprobs = self._found_logprobs(special, sampled, output.logprobs)
            sampled.prompt_logprobs = self._found_prompt_logprobs(special, output.logprobs)
        return sampled

    def _add_logprobs_of_logits(self, sampled: SampledTokens, wanted: Int32 | None, logits: Float32) -> None:
        if wanted is None or not len(wanted):
            return
        present = sampled.rows[wanted] >= 0
        if present.any():
            indices = wanted[present].astype(np.intp)
            sampled.logprobs = self._logprobs(logits[present], indices, sampled.rows, sampled.token_ids)

    def _end_special(self, sampled: SampledTokens, nothing_left: Callable[[int], bool]) -> None:
        """Note who ends by a grammar, or because rules alone forbid every token; see GrammarMasks.accept()."""
        sampled.grammar_ends = self._masks.accept(sampled.token_ids, sampled.finite, nothing_left)
        for index in np.flatnonzero(~sampled.finite).tolist():
            row = sampled.rows.item(index)
            if row < 0 or index in sampled.grammar_ends:
                continue
            request = self._columns.requests[row]
            if request.rules is not None and request.grammar is None and nothing_left(index):
                sampled.grammar_ends[index] = _CONTRADICTION

    def _found_logprobs(self, special: SpecialDraw, sampled: SampledTokens, found: FoundLogprobs) -> Logprobs | None:
        """Of the samples that are still there and have a token."""
        index, rows = special.samples, sampled.rows
        kept = (rows[index] >= 0) & (sampled.token_ids[index] >= 0)
        if not kept.any():
            return None
        wanted = self._columns.num_logprobs[rows[index][kept]]
        width = int(wanted.max())
        top_id, top_logprob = found.top_id[: len(index), :width].copy(), found.top_logprob[: len(index), :width].copy()
        for entry, first, ids in special.named_ids:
            if kept[entry]:
                top_id[entry, : len(ids)] = ids
                top_logprob[entry, : len(ids)] = found.logprob[first : first + len(ids)]
        top_id[kept] = np.where(np.arange(width) < wanted[:, None], top_id[kept], -1)
        count = len(index)
        return Logprobs(
            index[kept], found.rank[:count][kept], found.logprob[:count][kept], top_id[kept], top_logprob[kept]
        )

    def _found_prompt_logprobs(self, special: SpecialDraw, found: FoundLogprobs) -> list[tuple[int, Logprobs]]:
        parts: list[tuple[int, Logprobs]] = []
        start = special.first_prompt_entry
        for row, positions, num_wanted in special.prompts:
            chosen = slice(start, start + len(positions))
            start = chosen.stop
            logprobs = Logprobs(
                positions, found.rank[chosen].copy(), found.logprob[chosen].copy(),
                found.top_id[chosen, :num_wanted].copy(), found.top_logprob[chosen, :num_wanted].copy(),
            )  # fmt: skip
            parts.append((row, logprobs))
            self._columns.requests[row].num_prompt_logprobs_sent = int(positions[-1])
        return parts

    def _sample_drafts(self, rows: Int32, num_drafts: Int32, logits: Float32) -> Int32:
        """Sample behind every draft as if it had been accepted: its position, not the step, keys its randomness."""
        columns = self._columns
        owner = np.repeat(rows, num_drafts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(num_drafts) - num_drafts, num_drafts)
        token_ids, finite = np.zeros(len(owner), np.int32), np.zeros(len(owner), np.bool_)
        tokring_kernels.sample(
            logits,
            columns.temperature[owner],
            columns.top_k[owner],
            columns.top_p[owner],
            columns.min_p[owner],
            columns.seed[owner],
            columns.choice[owner],
            columns.num_tokens[owner].astype(np.int64) + 1 + within,
            token_ids,
            finite,
        )
        return token_ids

    def _silence_prompt_only(self, rows: Int32, token_ids: Int32) -> None:
        """Take back the token of requests that want none (max_tokens 0: logprobs of the prompt)."""
        columns = self._columns
        token_ids[columns.num_tokens[rows] >= columns.max_total[rows]] = -1

    def _apply_rules(self, rows: Int32, logits: Float32) -> None:
        columns = self._columns
        penalized: list[int] = []
        for index in np.flatnonzero(columns.is_special[rows]).tolist():
            row = int(rows[index])
            rules = columns.requests[row].rules
            if rules is not None:
                apply_rules(logits[index], rules, columns.tokens(row))
                if rules.has_penalties:
                    penalized.append(index)
        if penalized:
            self._apply_penalties(np.array(penalized, np.int32), rows, logits)

    def _apply_penalties(self, indices: Int32, rows: Int32, logits: Float32) -> None:
        columns = self._columns
        chosen = rows[indices]
        rules = [columns.requests[row].rules or LogitRules() for row in chosen.tolist()]
        stride = columns.max_model_len + 1
        tokring_kernels.apply_penalties(
            logits,
            indices,
            columns.token_ids.reshape(-1, stride),
            (columns.token_base[chosen] // stride).astype(np.int32),
            columns.num_prompt[chosen],
            columns.num_tokens[chosen],
            np.array([rule.repetition_penalty for rule in rules], np.float32),
            np.array([rule.presence_penalty for rule in rules], np.float32),
            np.array([rule.frequency_penalty for rule in rules], np.float32),
        )

    def _logprobs(
        self, raw_logits: Float32, indices: NDArray[np.intp], rows: Int32, token_ids: Int32
    ) -> Logprobs | None:
        """Logprobs of the tokens at `indices` by raw_logits[i], as they were before any rule; none for no token."""
        columns = self._columns
        sampled = token_ids[indices] >= 0
        indices, raw_logits = indices[sampled], raw_logits[sampled]
        if not len(indices):
            return None
        chosen = rows[indices]
        found = _logprobs(raw_logits, indices.astype(np.int32), token_ids[indices], columns.num_logprobs[chosen])
        if columns.num_special:
            for i in columns.is_special[chosen].nonzero()[0].tolist():
                request = columns.requests[chosen[i]]
                if request.logprob_ids is not None:
                    found.replace_alternatives(i, request.logprob_ids, raw_logits[i], int(token_ids[indices[i]]))
        return found

    def _prompt_logprobs(self, batch: StepBatch, logits: Float32) -> list[tuple[int, Logprobs]]:
        columns = self._columns
        found: list[tuple[int, Logprobs]] = []
        used = 0
        for index in np.flatnonzero(columns.is_special[batch.rows]).tolist():
            row = int(batch.rows[index])
            first, stop = columns.prompt_logits(row, int(batch.num_scheduled[index]))
            if first == stop:
                continue
            # The token at position p predicts the one at p + 1.
            positions = np.arange(first + 1, stop + 1, dtype=np.int32) + columns.num_computed[row]
            tokens = columns.tokens(row)[positions]
            request = columns.requests[row]
            wanted = np.full(len(positions), request.num_prompt_logprobs, np.int32)
            found.append((row, _logprobs(logits[used : used + stop - first], positions, tokens, wanted)))
            request.num_prompt_logprobs_sent = int(positions[-1])
            used += stop - first
        return found


def draw(logits: Float32, columns: DrawColumns, token_ids: Int32, finite: NDArray[np.bool_]) -> None:
    """Draw token_ids int32[m], finite bool[m] from `logits` float32[m, vocab_size]."""
    tokring_kernels.sample(
        logits,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        columns.seed,
        columns.choice,
        columns.position,
        token_ids,
        finite,
    )


def _logprobs(logits: Float32, index: Int32, token_ids: Int32, wanted: Int32) -> Logprobs:
    """Logprobs of token_ids[i] by logits[i], with wanted[i] alternatives each, padded to the widest."""
    width = int(wanted.max())
    logprob, rank, top_id, top_logprob = tokring_kernels.logprobs(logits, token_ids, width)
    top_id[np.arange(width) >= wanted[:, None]] = -1
    return Logprobs(index, rank, logprob, top_id, top_logprob)


_NONE = np.zeros(0, np.intp)
