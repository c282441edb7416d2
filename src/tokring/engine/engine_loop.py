"""EngineLoop: steps while there is work, sleeps on doorbells otherwise."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tokring.engine.core import CloseFrontEnd
from tokring.engine.engine_config import EngineConfig
from tokring.engine.engine_ends import EngineEnds
from tokring.engine.foreign_listener import ForeignListener
from tokring_ipc import (
    READY_DTYPE,
    AttachError,
    Call,
    CallStatus,
    ControlMethod,
    EngineChannel,
    FinishReason,
    PeerCorrupt,
    PeerGone,
    _core,
    receive_calls,
)

logger = logging.getLogger(__name__)
MAX_PEERS = _core.MAX_PEERS  # channels that a stats page has room for
RECHECK_S = 0.25  # covers a writer that was stopped between publishing and ringing
STALLED_RECHECK_S = 0.002  # a front end that makes room in its ring does not ring
ATTACH_TIMEOUT_S = 10.0
MAX_SEGMENT_BYTES = 1 << 30
_CALLS_OF_STRANGERS = (ControlMethod.INSPECT, ControlMethod.EXPLAIN)
MAX_FOREIGN_SEGMENT_BYTES = 128 << 20  # of each: a stranger must not ask for all the memory there is


class Supervisor(Protocol):
    """The part of tokring.launch.child.SupervisorLink that is used here."""

    def fileno(self) -> int: ...
    def receive(self) -> dict[str, Any] | None: ...
    def lending_fds(self) -> contextlib.AbstractContextManager[None]: ...


class AttachedFrontEnd(Protocol):
    """What a core keeps of one front end."""

    def step_bytes(self, *, logprobs: bool, prompt_logprobs: bool) -> int: ...


class Core(Protocol):
    """What is stepped: EngineCore, or ReplayCore in its place."""

    on_corrupt: CloseFrontEnd | None
    is_paused: bool

    @property
    def config(self) -> EngineConfig: ...
    @property
    def has_work(self) -> bool: ...
    def step(self) -> bool: ...
    def attach(self, index: int, channel: EngineChannel) -> AttachedFrontEnd: ...
    def detach(self, index: int) -> None: ...
    def finish_all(self, index: int, reason: FinishReason) -> int: ...


class Calls(Protocol):
    """Answers control calls."""

    def answer(self, call: Call, front_end: int) -> None: ...


class EngineLoop:
    """Connects front ends, wakes up for them, and ends when the supervisor says so."""

    def __init__(
        self, core: Core, supervisor: Supervisor, *, calls: Calls, engine_index: int, stats_page: Any = None
    ) -> None:
        # whole process
        self._core = core
        self._supervisor = supervisor
        self._engine_index = engine_index
        self._stats_page = stats_page
        self._calls = calls
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._drain_until: float | None = None  # time.monotonic() at which what still runs is cut off
        # by front end: this connection
        self._ends: dict[int, EngineEnds] = {}
        self._channels: dict[int, EngineChannel] = {}  # those that are attached
        # foreign front ends (--ipc-listen)
        self._listener: ForeignListener | None = None
        self._first_foreign_index = 0
        core.on_corrupt = self._close
        self._watch(supervisor.fileno(), self._on_supervisor)

    def expect(self, index: int, ends: EngineEnds) -> None:
        """Answer front end `index` as soon as it says HELLO on its control socket; a connection before it is over."""
        self._lose(index, "another front end takes its place")
        self._ends[index] = ends
        self._watch(ends.control.fileno(), lambda: self._accept(index, ends))

    def listen(self, listener: ForeignListener, first_index: int) -> None:
        """Serve foreign front ends too, as front ends `first_index` and up. Closes the listener at the end."""
        self._listener = listener
        self._first_foreign_index = first_index
        self._watch(listener.fileno(), self._on_foreign)

    def run(self) -> None:
        """Run until the supervisor asks for the end; raises SupervisorGone if it died."""
        while not self._has_ended():
            if self._core.step():
                self._handle_events(0.0)
            elif self._core.has_work and not self._core.is_paused:
                self._handle_events(STALLED_RECHECK_S)
            elif self._may_sleep():
                self._handle_events(RECHECK_S)
            elif self._core.is_paused:  # a ring keeps what there is no room for: hear who resumes
                self._handle_events(STALLED_RECHECK_S)
        for index in tuple(self._channels):
            self._core.finish_all(index, FinishReason.ABORT)
        self._core.step()  # the finish rows
        for index in tuple(self._ends):
            self._close(index, "the engine ends")
        if self._listener is not None:
            self._unwatch(self._listener.fileno())
            self._listener.close()

    # ---- sleeping ----

    def _may_sleep(self) -> bool:
        """Arm every ring; False if one of them is not empty after all."""
        return all(channel.arm_requests() for channel in self._channels.values())

    def _handle_events(self, timeout_s: float) -> None:
        if timeout_s and self._drain_until is not None:
            timeout_s = min(timeout_s, max(self._drain_until - time.monotonic(), 0.0))
        ready = self._poll.poll(timeout_s)
        if ready and self._stats_page is not None:
            self._stats_page.set("step_started_ns", time.monotonic_ns())  # a hang in a handler is one too
        for fd, events in ready:
            handler = self._handlers.get(fd)  # an event before this one may have closed it
            if handler is not None:
                handler()
                if events == select.EPOLLHUP:
                    self._unwatch(fd)  # a doorbell whose other end was closed would wake us without end

    def _has_ended(self) -> bool:
        if self._drain_until is None:
            return False
        return not self._core.has_work or self._core.is_paused or time.monotonic() >= self._drain_until

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        if fd in self._handlers:
            self._poll.unregister(fd)
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    # ---- connections ----

    def _accept(self, index: int, ends: EngineEnds) -> None:
        control = ends.control
        try:
            with contextlib.nullcontext() if self._is_foreign(index) else self._supervisor.lending_fds():
                channel = EngineChannel.accept(
                    control,
                    ends.req_doorbell_fd,
                    ends.out_doorbell_fd,
                    engine_index=self._engine_index,
                    max_segment_bytes=MAX_FOREIGN_SEGMENT_BYTES if self._is_foreign(index) else MAX_SEGMENT_BYTES,
                    timeout_s=ATTACH_TIMEOUT_S,
                )
        except AttachError as error:
            logger.error("front end %d can't be attached: %s", index, error)
            self._close(index, "it was never attached")
            return
        front_end = self._core.attach(index, channel)
        self._channels[index] = channel
        needed = front_end.step_bytes(logprobs=True, prompt_logprobs=True)
        if channel.out_free_bytes() < needed:
            self._lose(
                index,
                f"its OUT ring holds {channel.out_free_bytes()} bytes, a step with logprobs may need {needed}: use a "
                "larger ring, or a smaller --max-num-seqs",
            )
            return
        if self._stats_page is not None:
            channel.count_in(self._stats_page, index)
        self._watch(control.fileno(), lambda: self._on_control(index, control))
        self._watch(ends.req_doorbell_fd, channel.drain_doorbell)
        channel.write_ready(self._ready_record())
        channel.publish()
        channel.ring()
        logger.info("front end %d is attached", index)

    def _ready_record(self) -> np.ndarray[Any, np.dtype[np.void]]:
        config = self._core.config
        record = np.zeros(1, READY_DTYPE)
        record["max_model_len"] = config.max_model_len
        record["vocab_size"] = config.vocab_size
        record["block_size"] = config.block_size
        record["num_blocks"] = config.num_blocks
        record["max_num_seqs"] = config.max_num_seqs
        record["max_num_batched_tokens"] = config.max_num_batched_tokens
        record["max_logprobs"] = config.max_logprobs
        return record

    def _on_control(self, index: int, control: socket.socket) -> None:
        try:
            for call in receive_calls(control):
                if self._is_foreign(index) and call.method not in _CALLS_OF_STRANGERS:
                    self._refuse_foreign(call)
                else:
                    self._calls.answer(call, index)
        except PeerGone:
            self._lose(index, "front end gone")
        except PeerCorrupt as error:
            logger.error("front end %d: closing its channel: %s", index, error)
            self._lose(index, str(error))

    def _lose(self, index: int, reason: str) -> None:
        """End a front end's requests, which frees their blocks, and its connection; no effect if there is none."""
        if index not in self._ends:
            return
        if num_ended := self._core.finish_all(index, FinishReason.ABORT):
            logger.warning("front end %d is lost: its %d requests end", index, num_ended)
        self._core.detach(index)
        self._close(index, reason)

    def _close(self, index: int, reason: str) -> None:
        """Close one channel; the front end sees its control socket end."""
        ends = self._ends.pop(index, None)
        if ends is None:
            return
        self._unwatch(ends.control.fileno())
        self._unwatch(ends.req_doorbell_fd)
        channel = self._channels.pop(index, None)
        if channel is not None:
            logger.info("channel of front end %d is closed: %s", index, reason)
            channel.close()
        ends.close()

    def _on_foreign(self) -> None:
        assert self._listener is not None
        indexes = range(self._first_foreign_index, MAX_PEERS)
        index = next((index for index in indexes if index not in self._ends), None)
        ends = self._listener.accept()
        if ends is None:
            return
        if index is None:
            logger.error("a foreign front end is turned away: %d channels are open", MAX_PEERS)
            ends.close()
            return
        self.expect(index, ends)

    def _is_foreign(self, index: int) -> bool:
        return self._listener is not None and index >= self._first_foreign_index

    def _refuse_foreign(self, call: Call) -> None:
        """What all front ends would feel is for the server's own to ask."""
        with contextlib.suppress(PeerGone, BlockingIOError):
            call.refuse(CallStatus.UNKNOWN_METHOD, f"method {call.method} is not for front ends of --ipc-listen")

    # ---- supervisor ----

    def _on_supervisor(self) -> None:
        message = self._supervisor.receive()
        if message is None:
            return
        if message.get("type") == "shutdown":
            self._drain_until = time.monotonic() + float(message.get("deadline_s", 0.0))
        elif message.get("type") == "channel":
            if not message["fds"]:
                logger.error("no descriptors are left for the channel of front end %d", message["frontend"])
                return  # it sees its end closed, and asks for another
            control_fd, req_doorbell_fd, out_doorbell_fd = message["fds"]
            ends = EngineEnds(socket.socket(fileno=control_fd), req_doorbell_fd, out_doorbell_fd)
            self.expect(int(message["frontend"]), ends)
