"""EngineCore: one step after the other."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokring.engine.engine_config import EngineConfig
from tokring.engine.executor import AsynchronousExecutor, Executor, SynchronousExecutor
from tokring.engine.finish_check import finish_reasons
from tokring.engine.front_end import Channel, FrontEnd
from tokring.engine.grammar_compiler import GrammarCompiler
from tokring.engine.grammar_text import GrammarError
from tokring.engine.intake import Intake, RefusedRequest, RequestFrame
from tokring.engine.model_runner import AsynchronousRunner, ModelRunner
from tokring.engine.prefix_cache import PrefixCache
from tokring.engine.request import Request
from tokring.engine.sampling import SampledTokens, Sampler
from tokring.engine.scheduler import Scheduler
from tokring.engine.step_batch import StepBatch
from tokring.engine.step_in_flight import StepInFlight
from tokring.engine.step_stats import StepStats
from tokring.step_rows import StepRows
from tokring_ipc import ErrorCode, FinishReason, PeerCorrupt, StepPhase

logger = logging.getLogger(__name__)
RECEIVE, SCHEDULE, EXECUTE, SAMPLE, PUBLISH = map(int, StepPhase)  # enum members are slow to look up and to index by
MAX_OWED = 1024  # finish rows that wait for a front end's ring before no more requests of it are taken in


class CloseFrontEnd(Protocol):
    """Called when a front end's connection can't be used any more."""

    def __call__(self, index: int, reason: str) -> None: ...


class EngineCore:
    """Owns requests, KV bookkeeping and sampling; single thread. Channels come and go, the runner stays."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner | AsynchronousRunner,
        stats: StepStats | None = None,
        grammars: GrammarCompiler | None = None,
        step_rows: StepRows | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.prefix_cache = PrefixCache(config.num_blocks, config.block_size, config.hash_algorithm)
        draws_by_rules = runner.is_asynchronous and runner.draws_by_rules
        self.scheduler = Scheduler(config, self.prefix_cache, draws_by_rules=draws_by_rules)
        self.stats = stats if stats is not None else StepStats()
        self.front_ends: dict[int, FrontEnd] = {}
        self.grammars = grammars  # None: requests with a grammar are refused
        self.on_corrupt: CloseFrontEnd | None = None
        self._intake = Intake(config, self.prefix_cache)
        self._columns = self.scheduler.columns
        self._executor = _executor(config, runner, Sampler(self._columns))
        self._in_flight = self.scheduler.in_flight
        self._step_rows = step_rows if step_rows is not None else StepRows(config.max_running)
        self._first_to_poll = 0
        self.is_paused = False  # requests are taken in and may be cancelled, nothing is computed

    def step(self) -> bool:
        """Receive → schedule → execute → sample → publish. Returns whether anything was computed.

        Where steps run ahead, a step is launched here, and what is sampled and published is the one before.
        """
        stats = self.stats
        now_ns = stats.begin()
        self._receive(now_ns)
        stats.end_phase(RECEIVE)
        batch = None if self.is_paused else self._schedule(now_ns)
        stats.end_phase(SCHEDULE)
        if batch is not None:
            self._launch(batch)
        elif not self._in_flight:
            self._publish_owed()
            stats.end_idle(self.scheduler)
            return False
        while self._in_flight and (batch is None or self._must_complete()):
            self._complete()
        if not self._in_flight:
            self._step_rows.end()
        stats.end_step(0 if batch is None else batch.num_tokens, self.scheduler)
        return True

    def _schedule(self, now_ns: int) -> StepBatch | None:
        while self._in_flight and self.scheduler.must_know_tokens():
            self._complete()
        return self.scheduler.schedule(now_ns, self._stalled(now_ns))

    def _launch(self, batch: StepBatch) -> None:
        # For the case that the step kills this process: who was in it (see docs/architecture.md, resume).
        self._step_rows.begin(self._columns.step_words, self._columns.num_rows)
        step = self._executor.launch(batch)
        self._in_flight.append(step)
        if step.runs_ahead:
            self.scheduler.advance(step)

    def _must_complete(self) -> bool:
        """Whether the oldest step must be sampled before another one is scheduled."""
        return len(self._in_flight) > self._executor.num_ahead or not self._in_flight[-1].runs_ahead

    def _complete(self) -> None:
        """Sample and publish the oldest step in flight."""
        stats, step = self.stats, self._in_flight.popleft()
        self._executor.collect(step)
        stats.end_phase(EXECUTE)
        sampled, finished = self._account(step, self._executor.sample(step))
        stats.end_phase(SAMPLE)
        self._publish(sampled)
        for row in finished:
            self.scheduler.remove(row, keep_cached=self._columns.last_token.item(row) >= 0)
        stats.end_phase(PUBLISH)
        if step.batch.num_drafts is not None and sampled.num_accepted is not None:
            stats.speculated(step.batch.num_drafts, sampled.num_accepted)

    def pause(self) -> None:
        """Compute nothing until resume() beyond steps in flight; what runs keeps its place and blocks."""
        logger.info("paused: nothing is computed until it is resumed")
        self.is_paused = True
        self.stats.paused(True)

    def resume(self) -> None:
        """Go on after pause()."""
        logger.info("resumed")
        self.is_paused = False
        self.stats.paused(False)

    def reset_prefix_cache(self) -> None:
        """Forget everything cached, and for good: what running requests have computed is not cached when they end."""
        for request in self._columns.requests:
            request.use_prefix_cache, request.chain = False, b""
        self.prefix_cache.reset()

    # ---- connections ----

    def attach(self, index: int, channel: Channel) -> FrontEnd:
        """Serve a front end's new connection; an older one of the same index is given up."""
        self.detach(index)
        self.front_ends[index] = front_end = FrontEnd(
            index,
            channel,
            self.config.max_running,
            self.config.max_logprobs,
            self.config.max_prompt_logprobs_per_step,
            self.config.num_speculative_tokens,
        )
        return front_end

    def detach(self, index: int) -> None:
        """Drop a connection and all its requests at once; nobody is left to be told."""
        if self.front_ends.pop(index, None) is not None:
            self.finish_all(index, FinishReason.ABORT)

    @property
    def has_work(self) -> bool:
        """Whether a step would have anything to do, apart from new requests."""
        return (
            self.scheduler.has_work
            or bool(self._in_flight)
            or any(front_end.owes for front_end in self.front_ends.values())
        )

    # ---- receive ----

    def _receive(self, now_ns: int) -> None:
        self._take_requests(now_ns)
        for front_end in self.front_ends.values():
            if front_end.channel.new_cancels():
                self._abort_running(front_end, now_ns)
                self._abort_waiting(front_end, now_ns)
        if self.grammars is not None and self.grammars.num_waiting:
            self._take_grammars(self.grammars, now_ns)
        if self.scheduler.waiting.num_with_deadline:
            for request in self.scheduler.waiting.overdue(now_ns):
                self._finish_waiting(request, FinishReason.ERROR, now_ns, ErrorCode.DEADLINE)

    def _abort_running(self, front_end: FrontEnd, now_ns: int) -> None:
        columns = self._columns
        rows = slice(0, columns.num_rows)
        cancelled = front_end.channel.cancelled(columns.stream_slot[rows], columns.slot_generation[rows])
        cancelled &= columns.channel[rows] == front_end.index
        # From the last row down: removing one moves the last row into its place.
        for row in cancelled.nonzero()[0][::-1].tolist():
            self._finish_running(row, FinishReason.ABORT, now_ns)

    def _abort_waiting(self, front_end: FrontEnd, now_ns: int) -> None:
        waiting = self.scheduler.waiting
        places = slice(0, waiting.high_place)
        cancelled = front_end.channel.cancelled(waiting.stream_slot[places], waiting.slot_generation[places])
        # Also with one front end: places that are free belong to none, whatever generation a forged word names.
        cancelled &= waiting.channel[places] == front_end.index
        for place in cancelled.nonzero()[0].tolist():
            request = waiting.requests[place]
            assert request is not None
            self._finish_waiting(request, FinishReason.ABORT, now_ns)

    def _take_grammars(self, grammars: GrammarCompiler, now_ns: int) -> None:
        """Let the requests go on whose grammars have been compiled."""
        for request, error in grammars.take():
            if request.place < 0:
                continue  # it has ended meanwhile
            if error is None:
                self.scheduler.grammar_is_ready(request)
            else:
                assert request.grammar_text is not None
                logger.warning("a request's grammar is refused: %s: %s", request.grammar_text.kind.name, error)
                code, why = ErrorCode.GRAMMAR, str(error)
                if not isinstance(error, GrammarError):
                    code, why = ErrorCode.OVERLOADED, f"its constraint could not be tried: {error}"
                self._finish_waiting(request, FinishReason.ERROR, now_ns, code, why)

    def _take_requests(self, now_ns: int) -> None:
        """Take a bounded number of requests, one from each front end in turn, so that none crowds out the others."""
        polled = list(self.front_ends.values())
        if len(polled) > 1:
            self._first_to_poll = (self._first_to_poll + 1) % len(polled)
            polled = polled[self._first_to_poll :] + polled[: self._first_to_poll]
        left = self.config.max_intake_per_step
        while polled and left > 0:
            polled = [front_end for front_end in polled if self._take_request(front_end, now_ns)]
            left -= len(polled)

    def _take_request(self, front_end: FrontEnd, now_ns: int) -> bool:
        """Take one request; False if there is none (more)."""
        # Who sends requests but reads no answers has to wait: finish rows would pile up here without end.
        if not self.scheduler.has_room or front_end.num_owed >= MAX_OWED:
            return False
        try:
            frame = front_end.channel.poll_request()
        except PeerCorrupt as error:
            self._give_up(front_end, str(error))
            return False
        if frame is None:
            return False
        front_end.channel.release_requests()
        self._accept(front_end, frame, now_ns)
        return True

    def _accept(self, front_end: FrontEnd, frame: RequestFrame, now_ns: int) -> None:
        try:
            request = self._intake.accept(front_end.index, frame)
        except RefusedRequest as error:
            logger.warning("front end %d sent a request that is refused: %s", front_end.index, error)
            front_end.refuse(frame.stream_slot, frame.slot_generation, error.code, now_ns, str(error))
            self.stats.refused()
            return
        self.stats.accepted()
        if request.nothing_to_do:
            front_end.finish(request, FinishReason.LENGTH, now_ns)
        # new_cancels() is silent about words that were written before their request was taken.
        elif front_end.channel.is_cancelled(request.stream_slot, request.slot_generation):
            front_end.finish(request, FinishReason.ABORT, now_ns)
        else:
            self._add(request, front_end, now_ns)

    def _add(self, request: Request, front_end: FrontEnd, now_ns: int) -> None:
        if request.grammar_text is None:
            self.scheduler.add(request)
        elif self.grammars is None:
            why = "this model's tokenizer can't be used for grammars"
            logger.warning("a request's grammar is refused: %s", why)
            front_end.finish(request, FinishReason.ERROR, now_ns, error=ErrorCode.GRAMMAR, why=why)
        else:
            self.scheduler.add(request)
            self.grammars.submit(request)

    # ---- schedule ----

    def _stalled(self, now_ns: int) -> NDArray[np.int32] | None:
        """Channels whose ring has no space for a step; None if all have. Those that stay so lose their requests."""
        newcomers = self.scheduler.waiting.num_waiting > 0  # may be admitted into this step, whatever they ask for
        logprobs = newcomers or self._columns.num_with_logprobs > 0
        prompt_logprobs = newcomers or self._columns.num_special > 0
        num_steps = 1 + len(self._in_flight)
        stalled: list[int] = []
        for front_end in self.front_ends.values():
            if front_end.has_space(num_steps, logprobs=logprobs, prompt_logprobs=prompt_logprobs):
                front_end.stalled_since_ns = 0
                continue
            stalled.append(front_end.index)
            self.stats.stalled()
            front_end.stalled_since_ns = front_end.stalled_since_ns or now_ns
            if now_ns - front_end.stalled_since_ns > self.config.stalled_channel_s * 1e9:
                self._lose_requests(front_end)
                front_end.stalled_since_ns = now_ns
        return np.array(stalled, np.int32) if stalled else None

    # ---- sample and publish ----

    def _account(self, step: StepInFlight, sampled: SampledTokens) -> tuple[SampledTokens, list[int]]:
        """Append the sampled tokens and queue finish rows; return those that count, and the rows that end, last first.

        Last first: removing a row moves the last one into its place.
        """
        now_ns = time.monotonic_ns()
        sampled = self.scheduler.finish_step(step, sampled, now_ns)
        finished: list[int] = []
        for row, reason, error, stop_id in finish_reasons(self._columns, sampled):
            if stop_id >= 0 and stop_id not in self._columns.requests[row].stop_ids:
                self.scheduler.retract(row)  # the scheduler knows inline ones, and cut the row off behind the token
            self._queue_finish(row, reason, now_ns, error=error, stop_id=stop_id)
            finished.append(row)
        finished.sort(reverse=True)
        return sampled, finished

    def _publish(self, sampled: SampledTokens) -> None:
        """Write each front end's rows of the step, make them visible, then wake those that sleep."""
        columns = self._columns
        for row, logprobs in sampled.prompt_logprobs:
            request = columns.requests[row]
            if not self.front_ends[request.channel].write_prompt_logprobs(request, logprobs):
                raise RuntimeError(f"front end {request.channel}: no ring space for prompt logprobs that was reserved")
        for front_end in self.front_ends.values():
            mine = sampled
            if len(self.front_ends) > 1:
                mine = mine.where(columns.channel[mine.rows] == front_end.index)
            if mine.num_silent:
                mine = mine.where(mine.token_ids >= 0)
            if len(mine.rows):
                chosen = columns.select(mine.rows)
                slots, generations = columns.stream_slot[chosen], columns.slot_generation[chosen]
                if mine.num_accepted is not None:
                    written = front_end.write_several(slots, generations, columns, mine)
                else:
                    written = front_end.write(slots, generations, mine.token_ids, mine.logprobs)
                if not written:
                    raise RuntimeError(f"front end {front_end.index}: no ring space for a step that was reserved")
            front_end.write_owed(
                len(self._in_flight), logprobs=columns.num_with_logprobs > 0, prompt_logprobs=columns.num_special > 0
            )
            front_end.channel.publish()
            front_end.channel.ring()
        if self.prefix_cache.events is not None:
            self.prefix_cache.events.flush()

    def _publish_owed(self) -> None:
        for front_end in self.front_ends.values():
            if front_end.owes and front_end.write_owed():
                front_end.channel.publish()
                front_end.channel.ring()
        if self.prefix_cache.events is not None:
            self.prefix_cache.events.flush()

    # ---- ends ----

    def finish_all(self, index: int, reason: FinishReason, error: ErrorCode = ErrorCode.NONE) -> int:
        """End every request of one front end, each with a finish row; return how many."""
        now_ns = time.monotonic_ns()
        columns = self._columns
        rows = np.flatnonzero(columns.channel[: columns.num_rows] == index)[::-1].tolist()
        for row in rows:
            self._finish_running(row, reason, now_ns, error)
        waiting = self.scheduler.waiting.of_channel(index)
        for request in waiting:
            self._finish_waiting(request, reason, now_ns, error)
        return len(rows) + len(waiting)

    def _finish_running(self, row: int, reason: FinishReason, now_ns: int, error: ErrorCode = ErrorCode.NONE) -> None:
        self.scheduler.retract(row)
        self._queue_finish(row, reason, now_ns, error=error)
        self.scheduler.remove(row)

    def _finish_waiting(
        self, request: Request, reason: FinishReason, now_ns: int, error: ErrorCode = ErrorCode.NONE, why: str = ""
    ) -> None:
        self.scheduler.waiting.remove(request)
        if request.channel in self.front_ends:
            self.front_ends[request.channel].finish(request, reason, now_ns, error=error, why=why)

    def _queue_finish(
        self, row: int, reason: FinishReason, now_ns: int, *, error: ErrorCode = ErrorCode.NONE, stop_id: int = -1
    ) -> None:
        columns = self._columns
        request = columns.requests[row]
        columns.write_back(row)
        num_tokens = columns.num_tokens.item(row) - (columns.last_token.item(row) < 0)  # -1 is no token
        why = ""
        if request.grammar is not None and error == ErrorCode.GRAMMAR:
            why = request.grammar.failure or "it allows no token here"
        elif error == ErrorCode.INVALID_REQUEST:
            why = "allowed token ids, bad words, min_tokens and logit_bias leave no token to choose"
        if request.channel in self.front_ends:
            self.front_ends[request.channel].finish(
                request, reason, now_ns, error=error, stop_id=stop_id, num_tokens=num_tokens, why=why
            )

    def _lose_requests(self, front_end: FrontEnd) -> None:
        """End what a front end has that does not read its ring; the finish rows wait until it does."""
        num_lost = self.finish_all(front_end.index, FinishReason.ERROR, ErrorCode.OVERLOADED)
        if num_lost:
            self.stats.aborted_by_stall(num_lost)
            logger.error(
                "front end %d has not read its ring for %g s: its %d requests end",
                front_end.index,
                self.config.stalled_channel_s,
                num_lost,
            )

    def _give_up(self, front_end: FrontEnd, reason: str) -> None:
        """Close one connection whose ring holds what no front end of ours writes; the others go on."""
        logger.error("front end %d: closing its channel: %s", front_end.index, reason)
        if self.on_corrupt is not None:
            self.on_corrupt(front_end.index, reason)
        self.detach(front_end.index)


def _executor(config: EngineConfig, runner: ModelRunner | AsynchronousRunner, sampler: Sampler) -> Executor:
    if not runner.is_asynchronous:
        return SynchronousExecutor(runner, sampler)
    # Drafts are looked up behind tokens that must be known.
    return AsynchronousExecutor(runner, sampler, int(config.async_scheduling and not config.num_speculative_tokens))
