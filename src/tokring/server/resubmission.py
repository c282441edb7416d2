"""Resubmission: requests that an engine which died has left behind, on their way to the next one."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tokring.server.engine_errors import POISON, TOO_LARGE
from tokring.server.stream import Stream, StreamError, StreamState
from tokring.server.stream_slots import StreamSlots
from tokring.step_rows import RequestAtDeath

logger = logging.getLogger(__name__)

MAX_STRIKES = 2  # more, and the request is given up; at so many it runs alone


class Resubmission:
    """What the engine of now has yet to be sent, in order; a suspect is sent alone."""

    def __init__(
        self,
        slots: StreamSlots,
        *,
        send: Callable[[Stream], bool],
        end: Callable[[Stream, StreamError], None],
        num_tokens: Callable[[Stream], int],
    ) -> None:
        """`send`: submits a stream with all its tokens, False if the ring is full, ValueError if it never fits.

        `end`: there will be no answer of an engine; `num_tokens`: that a stream has so far.
        """
        self._slots = slots
        self._send = send
        self._end = end
        self._num_tokens = num_tokens
        self.is_paused = False  # there is no engine, and another one follows
        self._num_left_behind = 0  # requests that the last engine had been sent
        self._unsent: deque[Stream] = deque()
        self._on_trial: Stream | None = None  # it may have killed the last ones

    @property
    def must_wait(self) -> bool:
        """Whether a request has to wait behind others that are to be sent."""
        return self.is_paused or bool(self._unsent) or self._on_trial is not None

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to send, or to wait for before more is sent."""
        return bool(self._unsent) or self._on_trial is not None

    def append(self, stream: Stream) -> None:
        """A request that came while others wait."""
        self._unsent.append(stream)

    def engine_is_lost(self, *, pauses: bool) -> Iterable[Stream]:
        """The streams that end with the engine: all, or (`pauses`) those that nobody waits for any more."""
        self.is_paused = pauses
        self._unsent.clear()
        self._on_trial = None
        ending = []
        for stream in self._slots:
            if pauses and not stream.settled.done() and stream.state is not StreamState.CANCELLING:
                self._num_left_behind += stream.is_sent
                stream.is_sent = False
            else:
                ending.append(stream)
        return ending

    def note_deaths(self, at_death: Sequence[RequestAtDeath], *, is_fault: bool) -> None:
        """What the dead engine was working on. If it died of its own doing (`is_fault`), a request that it had not got
        any further is suspect: see docs."""
        for slot, generation, was_in_step, num_cached in at_death:
            stream = self._slots.get(slot)
            if stream is None or stream.generation != generation or stream.engine_is_done:
                continue
            if stream.num_cached_tokens < 0 and self._num_tokens(stream):
                stream.num_cached_tokens = num_cached  # of what the client has been sent, and is told in `usage`
            if self._num_tokens(stream) > stream.num_tokens_when_sent:
                stream.strikes = 0
            elif was_in_step and is_fault:
                stream.strikes += 1
            if stream.strikes > MAX_STRIKES:
                logger.error("the engine dies of the request in stream slot %d: it is ended", slot)
                self._end(stream, POISON)

    def begin(self) -> int:
        """There is an engine again: queues all that waits for one; returns how many the last one had been sent."""
        waiting = [stream for stream in self._slots if _awaits_engine(stream)]
        waiting.sort(key=lambda stream: (-stream.strikes if stream.strikes >= MAX_STRIKES else 0, stream.arrival_ns))
        self._unsent = deque(waiting)
        num_resumed, self._num_left_behind = self._num_left_behind, 0
        self.is_paused = False
        return num_resumed

    def send_waiting(self) -> None:
        """Sends what waits, as far as the ring has room; a suspect alone, until it gets further or ends."""
        while not self.is_paused:
            trial = self._on_trial
            if trial is not None:
                if not trial.engine_is_done and self._num_tokens(trial) == trial.num_tokens_when_sent:
                    return
                self._on_trial = None
            if not self._unsent:
                return
            stream = self._unsent[0]
            if _awaits_engine(stream):
                try:
                    if not self._send(stream):
                        return
                except ValueError as error:
                    self._end(stream, StreamError(413, f"{TOO_LARGE}: {error}.", "request_too_large"))
                if stream.strikes >= MAX_STRIKES:
                    self._on_trial = stream
            self._unsent.popleft()


def _awaits_engine(stream: Stream) -> bool:
    return stream.request is not None and not stream.is_sent and not stream.engine_is_done
