"""Scheduler: who gets which tokens and KV blocks in the next step."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from tokring.engine.batch_builder import BatchBuilder
from tokring.engine.block_table import BlockTable
from tokring.engine.engine_config import EngineConfig
from tokring.engine.prefix_cache import DIGEST_BYTES, PrefixCache
from tokring.engine.request import Request
from tokring.engine.request_columns import RequestColumns
from tokring.engine.sampling import SampledTokens
from tokring.engine.step_batch import StepBatch
from tokring.engine.step_in_flight import StepInFlight
from tokring.engine.waiting_queue import WaitingQueue


class Scheduler:
    """One token budget a step: running requests decode first, then prompts are computed in chunks, which while somebody
    decodes are no longer than max_num_prefill_tokens: that is how long the others' next token waits.

    Of the budget that decoding leaves, half goes to prompts in scheduling order and half to those with the fewest
    tokens left: the oldest prompt always advances by its half, and a short one never waits behind long ones.
    An admitted request owns blocks for all tokens that it has, so only decoding can run out of blocks; then the request
    that is last in scheduling order gives its blocks back and is computed again later.
    """

    def __init__(self, config: EngineConfig, prefix_cache: PrefixCache, *, draws_by_rules: bool = False) -> None:
        """`draws_by_rules`: AsynchronousRunner's."""
        self.config = config
        self._draws_by_rules = draws_by_rules
        self.prefix_cache = prefix_cache
        self.pool = prefix_cache.pool
        self.columns = RequestColumns(config.max_running, config.max_model_len)
        self.table = BlockTable(config.max_running, config.max_blocks_per_seq, config.block_size)
        self.waiting = WaitingQueue(config.max_num_seqs + config.max_queued)
        self.builder = BatchBuilder(self.columns, self.table, config)
        # Blocks kept for those who run already, so that an admission is not followed by a preemption at once.
        self._watermark = max(1, config.num_blocks // 100)
        self.in_flight: deque[StepInFlight] = deque()  # launched, oldest first

        # this step
        self._prefilling: list[Request] = []  # those with a prompt chunk
        self._prompt_logprobs_left = 0
        self._held: list[int] = []  # channels that take no further tokens
        self._admitting = True  # whether seats and memory allow for another admission

        # counters since start
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens
        self.prefix_hits = 0  # tokens
        self.num_surplus = 0  # tokens of steps in flight whose request had left

    def add(self, request: Request) -> None:
        """Queue a request, behind its sibling while that one computes the prompt of both."""
        deferred = request.parent_slot >= 0 and self._waits_for_sibling(request)
        self.waiting.push(request, deferred=deferred)

    def grammar_is_ready(self, request: Request) -> None:
        """Go on with a waiting request that has got its grammar."""
        self.waiting.grammar_is_ready(request, deferred=self._waits_for_sibling(request))

    @property
    def has_room(self) -> bool:
        """Whether another request may be added."""
        return self.columns.num_rows + self.waiting.num_waiting < self.waiting.capacity

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return self.columns.num_rows > 0 or self.waiting.num_waiting > 0

    def must_know_tokens(self) -> bool:
        """Whether the next step can't be scheduled while another one is in flight.

        So it is if somebody must be preempted, or is sampled by more than the runner draws by without them.
        """
        columns, waiting = self.columns, self.waiting
        if self._draws_by_rules:
            num_needing = columns.num_needing_tokens + waiting.num_needing_tokens
        else:
            num_needing = columns.num_special + waiting.num_special
        return num_needing > 0 or not self.builder.grow(self.pool)

    def schedule(self, now_ns: int, stalled: NDArray[np.int32] | None = None) -> StepBatch | None:
        """Choose the next step's tokens; None if there are none. Rows of `stalled` channels sit it out.

        Only to be called while steps are in flight unless must_know_tokens().
        """
        columns = self.columns
        self._prefilling.clear()
        self._prompt_logprobs_left = self.config.max_prompt_logprobs_per_step
        num_preemptions = self.num_preemptions
        if self.waiting.num_deferred:
            self._release_siblings()
        while not self.builder.grow(self.pool):
            self.preempt(int(columns.order[: columns.num_rows].argmax()))
        held = None if stalled is None else np.isin(columns.channel[: columns.num_rows], stalled)
        num_decoding, prefilling = self.builder.plan(held)
        if prefilling or self.waiting.num_ready:
            self._held = [] if stalled is None else stalled.tolist()
            self._admitting = self.num_preemptions == num_preemptions  # what was preempted would only come back
            left = self.config.max_num_batched_tokens - num_decoding
            if num_decoding:
                left = min(left, self.config.max_num_prefill_tokens)
            self._share_prefill(prefilling, left, now_ns)
        if self.config.num_speculative_tokens:
            num_scheduled = int(columns.num_scheduled[: columns.num_rows].sum())
            self.builder.draft(self.pool, self.config.max_num_batched_tokens - num_scheduled)
        return self.builder.build()

    def advance(self, step: StepInFlight) -> None:
        """Count the step built last as computed, and its tokens as sampled though nobody knows them yet."""
        step.lengths = self.builder.advance()
        self._note_prefilled(step)

    def _note_prefilled(self, step: StepInFlight) -> None:
        step.prefilled = [(request, self.columns.num_computed.item(request.row)) for request in self._prefilling]

    def finish_step(self, step: StepInFlight, sampled: SampledTokens, now_ns: int) -> SampledTokens:
        """Account for a step's tokens (-1: none) and the full blocks of prompts; returns those that are not surplus.

        `ended` of it are the indices of those that end, as far as columns can say.
        """
        lengths = step.lengths
        if lengths is None:
            if step.batch.num_drafts is not None:
                self._verify_drafts(step.batch.num_drafts, sampled)
        elif step.runs_ahead and len(sampled.rows) and sampled.rows.min() < 0:
            present = sampled.rows >= 0
            sampled, lengths = sampled.where(present), lengths[present]
            self.num_surplus += len(present) - len(lengths)
        sampled.ended, sampled.num_silent = self.builder.resolve(sampled.rows, lengths, sampled.token_ids, now_ns)
        if lengths is None:
            self._note_prefilled(step)
        for request, num_computed in step.prefilled:
            if request.row >= 0:
                self._insert_blocks(request, num_computed)
        return sampled

    def _verify_drafts(self, num_drafts: NDArray[np.int32], sampled: SampledTokens) -> None:
        """Accept the drafts that are what was sampled, as part of their sequences; forget the others."""
        assert sampled.following is not None
        columns = self.columns
        accepted = self.builder.verify(sampled.rows, num_drafts, sampled.token_ids, sampled.following)
        columns.num_tokens[sampled.rows] += accepted
        columns.num_computed[sampled.rows] -= num_drafts - accepted
        columns.num_drafted[sampled.rows] += num_drafts
        columns.num_accepted[sampled.rows] += accepted
        sampled.num_accepted = accepted

    def retract(self, row: int) -> None:
        """Take back the tokens of a request that leaves before the steps in flight have said what they are."""
        columns = self.columns
        for step in self.in_flight:
            columns.num_tokens[row] -= np.count_nonzero(step.rows == row)
        columns.num_computed[row] = min(columns.num_computed[row], columns.num_tokens[row])

    def remove(self, row: int, *, keep_cached: bool = True) -> Request:
        """Take a running request out, after columns.write_back(), and release its blocks.

        Their content stays findable unless it is not sound.
        """
        request = self.columns.requests[row]
        if keep_cached:
            self._insert_output_blocks(request, row)
        elif self.table.num_blocks.item(row):
            self.prefix_cache.invalidate(self.table.row(row))
        self.builder.leave(self.pool, row)
        last = self.columns.remove(row)
        for step in self.in_flight:
            step.forget(row, last)
        return request

    def preempt(self, row: int) -> None:
        """Send a running request back to the queue; it computes its tokens again, as far as the cache lost them."""
        assert not self.in_flight, "a request is preempted while a step of it is in flight"
        tokens = self.columns.tokens(row).copy()
        self.columns.write_back(row)
        request = self.remove(row)
        request.token_ids = tokens
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(request)

    def _share_prefill(self, running: list[int], left: int, now_ns: int) -> None:
        """Spend `left` tokens on prompts: half in scheduling order, the rest by fewest tokens left."""
        columns = self.columns
        by_order = left - left // 2
        left -= by_order
        lacking: dict[int, int] = {}
        if running:
            running.sort(key=columns.order.item)
            lacking = {row: columns.num_tokens.item(row) - columns.num_computed.item(row) for row in running}
        oldest = iter(running)
        row = next(oldest, None)
        while by_order > 0:
            request = self._next(shortest=False)
            if request is not None and (row is None or request.order < columns.order.item(row)):
                admitted = self._admit(request, lacking, now_ns)
                if admitted is not None:
                    by_order -= self._grant(lacking, admitted, by_order)
            elif row is not None:
                by_order -= self._grant(lacking, row, by_order)
                row = next(oldest, None)
            else:
                break
        left += by_order
        while left > 0 and (lacking or self.waiting.num_ready):
            nearest = min(lacking, key=lacking.__getitem__, default=None)
            request = self._next(shortest=True)
            if request is not None and (nearest is None or len(request.token_ids) < lacking[nearest]):
                nearest = self._admit(request, lacking, now_ns)
                if nearest is None:
                    continue  # admission is closed now
            if nearest is None:
                return
            left -= self._grant(lacking, nearest, left)

    def _next(self, *, shortest: bool) -> Request | None:
        """Return the waiting request to admit next; None if there is none, or no place for more in this step."""
        if not self._admitting:
            return None
        return self.waiting.shortest(self._held) if shortest else self.waiting.first(self._held)

    def _grant(self, lacking: dict[int, int], row: int, budget: int) -> int:
        """Schedule up to `budget` further tokens of a row's prompt; return how many.

        `lacking`: tokens that rows lack beyond those scheduled; without those that get no more in this step.
        """
        columns = self.columns
        request = columns.requests[row]
        granted = min(lacking[row], max(budget, 0))
        if request.num_prompt_logprobs >= 0:  # these are bounded over all requests together
            granted = min(granted, self._prompt_logprobs_left)
            self._prompt_logprobs_left -= granted
        if granted:
            num_scheduled = columns.num_scheduled.item(row)
            if not num_scheduled:
                self._prefilling.append(request)
            columns.num_scheduled[row] = num_scheduled + granted
        lacking[row] -= granted
        if not lacking[row] or (not granted and budget > 0):
            del lacking[row]
        return granted

    def _admit(self, request: Request, lacking: dict[int, int], now_ns: int) -> int | None:
        """Move a waiting request to a row with blocks for all its tokens; None if there is no seat or memory.

        The first refusal closes admission for this step: who is next in order must not be overtaken for want of blocks.
        """
        columns = self.columns
        num_tokens = len(request.token_ids)
        # At least one token is left to compute: sampling needs its logits.
        reads_cache = request.use_prefix_cache and request.num_prompt_logprobs < 0
        max_hits = (num_tokens - 1) // self.table.block_size if reads_cache else 0
        spare = self._watermark if columns.num_rows else 0
        has_seat = columns.num_rows < columns.max_rows
        num_hits = self.builder.admit(self.pool, request, max_hits, spare) if has_seat else -1
        if num_hits < 0:
            self._admitting = False
            return None
        self.waiting.remove(request)
        num_computed = num_hits * self.table.block_size
        if request.num_cached < 0:
            request.num_cached = min(num_computed, request.num_prompt)
        request.num_inserted = num_hits
        if request.scheduled_ns == 0:
            request.scheduled_ns = now_ns
        if reads_cache:
            self.prefix_queries += num_tokens
            self.prefix_hits += num_computed
        row = columns.add(request, num_computed)
        lacking[row] = num_tokens - num_computed
        return row

    def _insert_blocks(self, request: Request, num_computed: int) -> None:
        """Make the full blocks of the first num_computed tokens, as far as their hashes are known, findable."""
        full = min(num_computed // self.table.block_size, len(request.chain) // DIGEST_BYTES)
        first = request.num_inserted
        if first < full:
            self.builder.insert(self.pool, request.row, request.chain, first, full)
            if self.prefix_cache.events is not None:
                self.prefix_cache.events.note(request.chain, first, full, self.columns.tokens(request.row))
            request.num_inserted = full

    def _insert_output_blocks(self, request: Request, row: int) -> None:
        """Hash what was generated, only now that the request leaves: a running step has no time for it."""
        if request.use_prefix_cache:
            num_computed = self.columns.num_computed.item(row)
            tokens = self.columns.tokens(row)
            request.chain = self.prefix_cache.extend_chain(request.chain, request.root, tokens, num_computed)
            self._insert_blocks(request, num_computed)

    def _waits_for_sibling(self, request: Request) -> bool:
        shares = request.parent_slot >= 0 and request.use_prefix_cache
        return shares and self._computes_prompt(request.channel, request.parent_slot)

    def _computes_prompt(self, channel: int, stream_slot: int) -> bool:
        """Whether a stream slot's request is ready but waits, or runs and has not yet computed its prompt."""
        if self.waiting.holds(channel, stream_slot):
            return True
        columns = self.columns
        num_rows = columns.num_rows
        mask = (columns.channel[:num_rows] == channel) & (columns.stream_slot[:num_rows] == stream_slot)
        # Its blocks can be found once the step with its first token has been collected.
        lacks_prompt = columns.num_computed[:num_rows] < columns.num_prompt[:num_rows]
        return bool((lacks_prompt | (columns.first_token_ns[:num_rows] == 0))[mask].any())

    def _release_siblings(self) -> None:
        for channel, parent_slot in self.waiting.deferred_parents():
            if not self._computes_prompt(channel, parent_slot):
                self.waiting.release_deferred(channel, parent_slot)
