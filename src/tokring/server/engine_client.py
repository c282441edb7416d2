"""EngineClient: the front end's side of one channel: stream slots, submission, and the way of frames to the token path.

Ring -> socket: doorbell -> `_on_doorbell` -> `_drain` -> TokenPath.step. No task, queue or object per token.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.request_record import seed_source
from tokring.server.engine_channel import Channel, Connection
from tokring.server.engine_errors import (
    ABORTED,
    ENGINE_IS_GONE,
    TOO_LARGE,
    error_of_finish,
    explained,
    is_explained,
    lost_finish,
)
from tokring.server.engine_limits import EngineLimits
from tokring.server.errors import ApiError, overloaded, unavailable
from tokring.server.finish_rate import FinishRate
from tokring.server.resubmission import Resubmission
from tokring.server.stats import FrontEndStats
from tokring.server.stream import EngineRequest, PromptLogprobs, Stream, StreamError, StreamState
from tokring.server.stream_slots import StreamSlots
from tokring.server.token_path import Event, EventKind, FrameError, Result, TokenPath
from tokring.step_rows import RequestAtDeath
from tokring_ipc import ControlCaller, ControlMethod, FinishReason, FrameType, PeerCorrupt, PeerGone

logger = logging.getLogger(__name__)

DRAIN_BUDGET_NS = 1_000_000
RECHECK_S = 0.25  # a writer stopped between publishing and ringing rings late; see DESIGN.md, rings
TICK_S = 1.0
EXPLAIN_TIMEOUT_S = 2.0


class EngineClient:
    """One engine as a front end sees it. Used by the loop thread only."""

    def __init__(
        self,
        token_path: TokenPath,
        *,
        num_stream_slots: int,
        max_in_flight: int,
        max_queued_tokens: int = 1 << 40,
        stats: FrontEndStats,
        on_death: Callable[[str], None],
        draw_seed: Callable[[], int] | None = None,
        on_pause: Callable[[str], None] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`on_pause`: told of a death that another engine follows: requests wait until resume(). None: never."""
        self._loop = loop or asyncio.get_running_loop()
        # Whole process.
        self.token_path = token_path
        self.max_in_flight = max_in_flight
        self.num_stream_slots = num_stream_slots
        self._max_queued_tokens = max_queued_tokens
        self._stats = stats
        self.connections: dict[int, Connection] = {}
        self.requests_finished = 0
        self._on_death = on_death
        self.draw_seed = draw_seed or seed_source(None)
        self._on_pause = on_pause
        self._slots = StreamSlots(num_stream_slots, self._loop)
        self._prompt_tokens = 0  # of all requests in flight
        self._finish_rate = FinishRate(TICK_S)
        self._resubmission = Resubmission(
            self._slots, send=self._send, end=self._end_without_engine, num_tokens=self._num_tokens
        )
        # This connection.
        self.limits: EngineLimits | None = None
        self._channel: Channel | None = None
        self._calls: ControlCaller | None = None
        self._ready: asyncio.Future[EngineLimits] = self._loop.create_future()
        self._recheck: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._tick_due_s = 0.0
        self._continue: asyncio.Handle | None = None
        self._awaiting_first_token: set[Stream] = set()
        self._watch_blocked_connections()

    # ---- attaching and losing the channel ----

    def attach(self, channel: Channel) -> "asyncio.Future[EngineLimits]":
        """Starts reading from a connected channel; the future holds what the engine's READY frame says."""
        self._channel = channel
        self._calls = ControlCaller(channel.control)
        self._ready = self._loop.create_future()
        self._loop.add_reader(channel.out_doorbell_fd, self._on_doorbell)
        self._loop.add_reader(channel.control.fileno(), self._on_control)
        if self._tick is None:
            self._schedule_tick()
        self._drain()
        return self._ready

    @property
    def is_attached(self) -> bool:
        return self._channel is not None

    def close(self) -> None:
        """Ends everything: pending streams get an error, timers and readers are removed."""
        self._lose_engine(pauses=False)
        for timer in (self._recheck, self._tick, self._continue):
            if timer is not None:
                timer.cancel()
        self._recheck = self._tick = self._continue = None
        if self.token_path.writable_fd() >= 0:
            self._loop.remove_reader(self.token_path.writable_fd())
        self.token_path.release()
        for stream in self._slots:
            stream.is_open = False

    def end_all(self, message: str) -> None:
        """Ends every pending stream with an error and cancels it in the engine (end of a drain)."""
        error = ENGINE_IS_GONE if self._channel is None else StreamError(503, message, "shutting_down")
        for stream in self._slots:
            if not stream.settled.done():
                stream.settle(error)
                self.cancel(stream)

    def _on_control(self) -> None:
        assert self._calls is not None
        if not self._calls.on_readable():
            self.engine_died("the engine closed its control socket")

    def engine_died(self, reason: str) -> None:
        """Takes what the engine published before it died and gives the connection up. Told twice: no effect."""
        if self._channel is None:
            return
        # Drain before closing: what is finished in there ends as if nothing had happened.
        try:
            while (frame := self._channel.poll()) is not None:
                if self._take_frame(frame):
                    self._go_on_soon()
        except (PeerCorrupt, FrameError) as error:
            logger.error("engine channel: %s; what follows it is lost", error)
        self._deliver()
        self._lose_engine(pauses=self._on_pause is not None)
        (self._on_pause or self._on_death)(reason)

    def _lose_engine(self, *, pauses: bool) -> None:
        """Closes the channel; requests wait for the next engine (`pauses`), or end with an error."""
        if self._channel is not None:
            self._close_channel(self._channel)
        for stream in self._resubmission.engine_is_lost(pauses=pauses):
            self._end_without_engine(stream, ENGINE_IS_GONE)

    def _end_without_engine(self, stream: Stream, error: StreamError) -> None:
        """There will be no finish row; `error` is for those who still wait for text."""
        if not stream.engine_is_done:
            stream.engine_is_done = True
            self._count_end(stream)
        stream.settle(error)
        stream.mark_finished()
        self._free_if_done(stream)

    def _close_channel(self, channel: Channel) -> None:
        self._channel = None
        self._loop.remove_reader(channel.out_doorbell_fd)
        control = channel.control
        self._loop.remove_reader(control.fileno())
        channel.close()
        control.close()
        if self._calls is not None:
            self._calls.fail_pending(PeerGone(ENGINE_IS_GONE.message))
            self._calls = None
        if not self._ready.done():
            self._ready.set_exception(ConnectionError(ENGINE_IS_GONE.message))
            self._ready.exception()  # mark as retrieved: nobody may be waiting

    def result(self, stream: Stream) -> Result:
        """Its counts and finish so far; after a resume with the count of cached tokens that was true at first."""
        result = self.token_path.result(stream.slot)
        finish = result.finish
        if finish is None and stream.engine_is_done:
            finish = lost_finish(stream.num_prompt_tokens, result.num_tokens)
        if finish is not None and stream.num_tokens_when_sent:
            # It was scheduled and had its first token in an engine that is dead: nobody knows when.
            finish = finish._replace(scheduled_ns=0, first_token_ns=0)
        if finish is not None and stream.num_cached_tokens >= 0:
            finish = finish._replace(num_cached_tokens=stream.num_cached_tokens)
        return result._replace(finish=finish)

    def call(self, method: ControlMethod) -> "asyncio.Future[Any]":
        """The engine's answer to a control call, which it gives between two steps.

        Fails with CallRefused, or an OSError: PeerGone (there is no engine now), BlockingIOError (it reads no calls).
        """
        if self._calls is None:
            raise PeerGone(ENGINE_IS_GONE.message)
        return asyncio.wrap_future(self._calls.call(method), loop=self._loop)

    # ---- the next engine ----

    def note_deaths(self, at_death: Sequence[RequestAtDeath], *, is_fault: bool) -> None:
        """See Resubmission."""
        self._resubmission.note_deaths(at_death, is_fault=is_fault)

    def resume(self) -> int:
        """Sends the new engine every request that the last one left behind; returns their number."""
        num_resumed = self._resubmission.begin()
        self._stats.resumed(num_resumed)
        self._send_waiting()
        return num_resumed

    def _send_waiting(self) -> None:
        if self._channel is not None:
            self._resubmission.send_waiting()

    def _num_tokens(self, stream: Stream) -> int:
        return self.token_path.result(stream.slot).num_tokens if stream.is_open else 0

    def _send(self, stream: Stream) -> bool:
        """Submits a request with all tokens that it has so far; False if the ring is full."""
        assert self._channel is not None and stream.request is not None
        request = stream.request
        prior_output = self.token_path.token_ids(stream.slot)
        if not len(prior_output):
            stream.prompt_logprobs.clear()  # they come again
        self._slots.renew(stream)
        self.token_path.rebind(stream.slot, stream.generation)
        ids = request.resumed(stream.generation, prior_output)
        if not self._channel.submit(request.record, ids, request.extensions):
            return False
        stream.is_sent = True
        stream.num_tokens_when_sent = len(prior_output)
        self._expect_frames()
        return True

    # ---- admission, submission, cancellation ----

    @property
    def in_flight(self) -> int:
        return self._slots.num_used

    def open(self, count: int, arrival_ns: int, num_prompt_tokens: int = 0) -> list[Stream]:
        """Takes `count` stream slots, or raises ApiError (503) before anything is sent."""
        if self._channel is None and not self._resubmission.is_paused:
            raise unavailable("The engine is not running.", "engine_dead")
        if count > self.max_in_flight:
            raise ApiError(
                400, f"n × prompts is {count}; at most {self.max_in_flight} sequences can be in flight.", param="n"
            )
        if self.in_flight + count > self.max_in_flight or count > self._slots.num_free:
            raise overloaded("The server is at its limit of waiting requests; try again later.", self.retry_after_s())
        if self.in_flight and self._waiting_tokens(num_prompt_tokens) > self._max_queued_tokens:
            raise overloaded(
                "The server is at its limit of waiting prompt tokens; try again later.", self.retry_after_s()
            )
        return [self._slots.take(arrival_ns) for _ in range(count)]

    def _waiting_tokens(self, num_more: int) -> int:
        """Prompt tokens that must be waiting: what the KV cache can't hold of those in flight and `num_more`."""
        held = self.limits.num_blocks * self.limits.block_size if self.limits is not None else 0
        return self._prompt_tokens + num_more - held

    def submit(
        self,
        stream: Stream,
        record: npt.NDArray[Any],
        ids: npt.NDArray[np.int32],
        extensions: bytes,
        *,
        may_wait: bool = False,
    ) -> None:
        """Hands one request to the engine, or to the next one if there is none now.

        `may_wait`: for room in the ring, as the further sequences do of a client's request that has begun.
        Raises ApiError: 503 if the request ring is full, 413 if it is too small.
        """
        if self._channel is None and not self._resubmission.is_paused:
            raise unavailable("The engine is not running.", "engine_dead")
        stream.is_sent = not self._resubmission.must_wait and self._submit(record, ids, extensions, may_wait)
        if not stream.is_sent:
            self._resubmission.append(stream)
        stream.request = EngineRequest(record, ids, extensions)
        stream.num_prompt_tokens = len(ids)
        self._prompt_tokens += len(ids)
        self._expect_frames()

    def _submit(self, record: npt.NDArray[Any], ids: npt.NDArray[np.int32], extensions: bytes, may_wait: bool) -> bool:
        """Whether the ring had room."""
        assert self._channel is not None
        try:
            is_accepted = self._channel.submit(record, ids, extensions)
        except ValueError as error:  # no ring of this size could ever hold it
            raise ApiError(413, f"{TOO_LARGE}: {error}.", code="request_too_large") from None
        if not is_accepted and not may_wait:
            raise overloaded("The engine's request ring is full; try again later.", self.retry_after_s(), "ring_full")
        return bool(is_accepted)

    def _expect_frames(self) -> None:
        if self._recheck is None:
            self._recheck = self._loop.call_later(RECHECK_S, self._on_recheck)

    def never_submitted(self, stream: Stream) -> None:
        """Gives back the slot of a stream that the engine never heard of."""
        stream.engine_is_done = True
        stream.settle(ABORTED)
        self.release(stream)

    def release(self, stream: Stream) -> None:
        """The handler is done with the stream: cancelled if it still runs, freed once the engine is done too."""
        stream.owner_is_done = True
        if not stream.engine_is_done:
            self.cancel(stream)
        self._free_if_done(stream)

    def cancel(self, stream: Stream) -> None:
        """Stops the engine's work on the stream before its next step; its tokens are dropped from now on."""
        if stream.state is StreamState.CANCELLING or stream.engine_is_done:
            return
        stream.state = StreamState.CANCELLING
        if stream.is_open:
            self.token_path.cancel(stream.slot)
        if self._channel is not None and stream.is_sent:
            self._channel.cancel(stream.slot, stream.generation)
        else:
            self._end_without_engine(stream, ABORTED)

    def first_token(self, stream: Stream) -> "asyncio.Future[None]":
        """Done at the stream's first token or its end: for answers that must not begin before."""
        if stream.started is None:
            stream.started = self._loop.create_future()
            self._awaiting_first_token.add(stream)
            if stream.settled.done():
                stream.mark_started()
        return stream.started

    def retry_after_s(self) -> int:
        """Seconds until a place should be free, from the rate at which requests have been finishing."""
        return self._finish_rate.retry_after_s(self.in_flight)

    def _free_if_done(self, stream: Stream) -> None:
        if not (stream.engine_is_done and stream.owner_is_done) or self._slots.get(stream.slot) is not stream:
            return
        if stream.is_open:
            self.token_path.close(stream.slot)
        self._prompt_tokens -= stream.num_prompt_tokens
        self._slots.free(stream)

    # ---- frames ----

    def _on_doorbell(self) -> None:
        self._drain(rung=True)

    def _drain(self, budget_ns: int = DRAIN_BUDGET_NS, *, rung: bool = False) -> None:
        """Takes frames until the ring is empty and armed, or the budget is spent and the loop goes on later."""
        channel = self._channel
        if channel is None:
            return
        deadline = time.monotonic_ns() + budget_ns
        try:
            while True:
                frame = channel.poll()
                if frame is None:
                    channel.release()
                    if rung:  # after the frames, which need not wait for it; then one more look, as ever
                        channel.drain_doorbell()
                        rung = False
                    elif channel.arm():
                        break
                elif self._take_frame(frame) or time.monotonic_ns() > deadline:
                    channel.release()
                    if rung:
                        channel.drain_doorbell()
                    self._go_on_soon()
                    break
        except (PeerCorrupt, FrameError) as error:
            logger.error("engine channel: %s; the channel is closed", error)
            # The engine lives and serves others: no other follows it.
            self._lose_engine(pauses=False)
            self._on_death(f"corrupt frame: {error}")
            return
        self._deliver()

    def _take_frame(self, frame: Any) -> bool:
        """Handles one frame; whether the token path has sending left to do."""
        kind = frame.type
        if kind == FrameType.STEP:
            self._handle(self.token_path.step(frame.address, frame.length))
            if self._awaiting_first_token:
                self._look_for_first_tokens()
            if self._resubmission.is_busy:
                self._send_waiting()
            return self.token_path.pending() > 0
        if kind == FrameType.PROMPT_LOGPROBS:
            self._take_prompt_logprobs(frame.prompt_logprobs)
        elif kind == FrameType.READY:
            self._take_ready(frame.ready)
        return False

    def _go_on_soon(self) -> None:
        if self._continue is None:
            self._continue = self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._continue = None
        if self.token_path.pending():
            self._handle(self.token_path.flush())
        if self.token_path.pending():
            self._deliver()
            self._go_on_soon()
        elif self._channel is not None:
            self._drain()
        else:
            self._deliver()

    def _deliver(self) -> None:
        """BYTES-mode output (TLS) to the transports."""
        for connection, data in self.token_path.outputs():
            target = self.connections.get(connection)
            if target is not None:
                target.deliver(data)

    def handle_events(self, events: Sequence[Event]) -> None:
        """Events of attach() and write() calls that handlers made, and their output."""
        self._handle(events)
        self._deliver()
        if self.token_path.pending():
            self._go_on_soon()

    def _handle(self, events: Sequence[Event]) -> None:
        for kind, subject in events:
            if kind == EventKind.FINISHED:
                self._on_finished(subject)
            elif kind == EventKind.STOPPED:
                self._on_stopped(subject)
            elif kind == EventKind.DELTA:
                self._on_delta(subject)
            elif kind == EventKind.SENT:
                self._on_sent(subject)
            elif kind in (EventKind.DEAD, EventKind.OVER_LIMIT):
                self._on_connection_lost(kind, subject)

    def _on_finished(self, slot: int) -> None:
        stream = self._slots.get(slot)
        if stream is None or stream.engine_is_done:
            return
        stream.engine_is_done = True
        self._count_end(stream)
        error = self._error_of(stream)
        if error is not None and is_explained(error) and self._calls is not None:
            self._settle_explained(stream, error)
        else:
            stream.settle(error)
        stream.mark_finished()
        self._free_if_done(stream)

    def _count_end(self, stream: Stream) -> None:
        self.requests_finished += 1
        if stream.params is None or not stream.is_open:
            return
        result = self.result(stream)
        self._stats.request_finished(
            stream.params,
            stream.arrival_ns,
            result,
            is_abort=stream.state is StreamState.CANCELLING,
            is_first_choice=stream.choice_index == 0,
            longest_choice=stream.siblings.finish(result.num_tokens) if stream.siblings is not None else None,
        )

    def _error_of(self, stream: Stream) -> StreamError | None:
        finish = self.token_path.result(stream.slot).finish
        if finish is not None and finish.reason == FinishReason.ABORT and stream.state is StreamState.CANCELLING:
            return None
        return error_of_finish(finish)

    def _settle_explained(self, stream: Stream, error: StreamError) -> None:
        """Settles with the engine's own words, which are asked for; without them if it does not say any."""
        assert self._calls is not None
        answer = self._calls.call(ControlMethod.EXPLAIN, [stream.slot, stream.generation])
        answer.add_done_callback(lambda done: stream.settle(explained(error, done)))
        self._loop.call_later(EXPLAIN_TIMEOUT_S, stream.settle, error)

    def _on_stopped(self, slot: int) -> None:
        stream = self._slots.get(slot)
        if stream is not None:
            stream.settle()
            self.cancel(stream)

    def _on_delta(self, slot: int) -> None:
        stream = self._slots.get(slot)
        if stream is not None and stream.changed is not None:
            stream.changed.set()

    def _on_sent(self, connection: int) -> None:
        target = self.connections.get(connection)
        if target is not None:
            target.sent()

    def _on_connection_lost(self, kind: EventKind, connection: int) -> None:
        target = self.connections.get(connection)
        if target is not None:
            self._stats.connection_lost(is_slow=kind == EventKind.OVER_LIMIT)
            target.lost("the client reads too slowly" if kind == EventKind.OVER_LIMIT else "the client is gone")

    def _look_for_first_tokens(self) -> None:
        for stream in list(self._awaiting_first_token):
            if stream.settled.done() or self.token_path.result(stream.slot).num_tokens:
                stream.state = StreamState.RUNNING if stream.state is StreamState.SUBMITTED else stream.state
                stream.mark_started()
                self._awaiting_first_token.discard(stream)

    def _take_prompt_logprobs(self, columns: tuple[Any, ...]) -> None:
        """Keeps copies: the frame's views die with the next release()."""
        record, rank, logprob, top_id, top_logprob = columns
        slot = int(record["stream_slot"])
        stream = self._slots.get(slot)
        if stream is None or stream.generation != int(record["slot_generation"]):
            return
        stream.prompt_logprobs.append(PromptLogprobs.copied(int(record["start"]), rank, logprob, top_id, top_logprob))

    def _take_ready(self, ready: Any) -> None:
        self.limits = EngineLimits.of(ready)
        if not self._ready.done():
            self._ready.set_result(self.limits)

    # ---- timers ----

    def _on_recheck(self) -> None:
        self._recheck = None
        self._drain()
        self._send_waiting()
        if self.in_flight and self._channel is not None:
            self._expect_frames()

    def _on_tick(self) -> None:
        lag_s = self._loop.time() - self._tick_due_s
        self._schedule_tick()
        self._stats.tick(int(max(0.0, lag_s) * 1e9), self.in_flight, len(self.connections))
        self._stats.token_path(self.token_path.counters())
        self._finish_rate.tick(self.requests_finished)
        if self.connections:
            self.handle_events(self.token_path.flush())
            now_ns = time.monotonic_ns()
            for connection in list(self.connections.values()):
                connection.tick(now_ns)

    def _schedule_tick(self) -> None:
        self._tick_due_s = self._loop.time() + TICK_S
        self._tick = self._loop.call_at(self._tick_due_s, self._on_tick)

    def _watch_blocked_connections(self) -> None:
        writable_fd = self.token_path.writable_fd()
        if writable_fd >= 0:
            self._loop.add_reader(writable_fd, lambda: self.handle_events(self.token_path.flush()))
