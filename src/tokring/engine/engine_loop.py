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
from tokring.engine.foreign_listener import ForeignEnds, ForeignListener
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
MAX_FOREIGN_SEGMENT_BYTES = 128 << 20  # of each: a stranger must not ask for all the memory there is


class Supervisor(Protocol):
    """The part of tokring.launch.child.SupervisorLink that is used here."""

    def fileno(self) -> int: ...
    def receive(self) -> dict[str, Any] | None: ...


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

    def answer(self, call: Call) -> None: ...


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
        self._channels: dict[int, EngineChannel] = {}
        # foreign front ends (--ipc-listen)
        self._listener: ForeignListener | None = None
        self._foreign: dict[int, ForeignEnds] = {}
        self._first_foreign_index = 0
        core.on_corrupt = self._close
        self._watch(supervisor.fileno(), self._on_supervisor)

    def expect(self, index: int, control: socket.socket, req_doorbell_fd: int, out_doorbell_fd: int) -> None:
        """Answer front end `index` as soon as it says HELLO on its control socket."""
        self._watch(control.fileno(), lambda: self._accept(index, control, req_doorbell_fd, out_doorbell_fd))

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
        for index in tuple(self._channels):
            self._core.finish_all(index, FinishReason.ABORT)
        self._core.step()  # the finish rows
        for index in tuple(self._channels):
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
        for fd, events in self._poll.poll(timeout_s):
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

    def _accept(self, index: int, control: socket.socket, req_doorbell_fd: int, out_doorbell_fd: int) -> None:
        try:
            channel = EngineChannel.accept(
                control,
                req_doorbell_fd,
                out_doorbell_fd,
                engine_index=self._engine_index,
                max_segment_bytes=MAX_FOREIGN_SEGMENT_BYTES if index in self._foreign else MAX_SEGMENT_BYTES,
                timeout_s=ATTACH_TIMEOUT_S,
            )
        except AttachError as error:
            logger.error("front end %d can't be attached: %s", index, error)
            self._unwatch(control.fileno())
            control.close()
            self._forget_foreign(index)
            return
        front_end = self._core.attach(index, channel)
        self._channels[index] = channel
        needed = front_end.step_bytes(logprobs=True, prompt_logprobs=True)
        if channel.out_free_bytes() < needed:
            self._core.detach(index)
            self._unwatch(control.fileno())
            self._close(
                index,
                f"its OUT ring holds {channel.out_free_bytes()} bytes, a step with logprobs may need {needed}: use a "
                "larger ring, or a smaller --max-num-seqs",
            )
            return
        if self._stats_page is not None:
            channel.count_in(self._stats_page, index)
        self._watch(control.fileno(), lambda: self._on_control(index, control))
        self._watch(req_doorbell_fd, channel.drain_doorbell)
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
                if index in self._foreign and call.method != ControlMethod.INSPECT:
                    self._refuse_foreign(call)
                else:
                    self._calls.answer(call)
        except PeerGone:
            if num_ended := self._core.finish_all(index, FinishReason.ABORT):
                logger.warning("front end %d is gone: its %d requests end", index, num_ended)
            self._core.detach(index)
            self._close(index, "front end gone")
        except PeerCorrupt as error:
            logger.error("front end %d: closing its channel: %s", index, error)
            self._core.detach(index)
            self._close(index, str(error))

    def _close(self, index: int, reason: str) -> None:
        """Close one channel; the front end sees its control socket end."""
        channel = self._channels.pop(index, None)
        if channel is None:
            return
        logger.info("channel of front end %d is closed: %s", index, reason)
        self._unwatch(channel.control.fileno())
        self._unwatch(channel.req_doorbell_fd)
        channel.close()
        channel.control.close()
        self._forget_foreign(index)

    def _on_foreign(self) -> None:
        assert self._listener is not None
        indexes = range(self._first_foreign_index, MAX_PEERS)
        index = next((index for index in indexes if index not in self._foreign), None)
        ends = self._listener.accept()
        if ends is None:
            return
        if index is None:
            logger.error("a foreign front end is turned away: %d channels are open", MAX_PEERS)
            ends.close()
            return
        self._foreign[index] = ends
        self.expect(index, ends.control, ends.req_doorbell_fd, ends.out_doorbell_fd)

    def _refuse_foreign(self, call: Call) -> None:
        """What all front ends would feel is for the server's own to ask."""
        with contextlib.suppress(PeerGone, BlockingIOError):
            call.refuse(CallStatus.UNKNOWN_METHOD, f"method {call.method} is not for front ends of --ipc-listen")

    def _forget_foreign(self, index: int) -> None:
        ends = self._foreign.pop(index, None)
        if ends is not None:
            ends.close()

    # ---- supervisor ----

    def _on_supervisor(self) -> None:
        message = self._supervisor.receive()
        if message is not None and message.get("type") == "shutdown":
            self._drain_until = time.monotonic() + float(message.get("deadline_s", 0.0))
