"""Rare control calls beside the rings: typed CALL and RESULT messages on the channel's control socket.

A method is a ControlMethod, never a name; arguments and results are JSON. Nothing here blocks.
"""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokring_ipc import _core
from tokring_ipc.enums import CallStatus, ControlKind, ControlMethod

_HEADER = _core.struct_dtype("ControlHeader")
_CALL = _core.struct_dtype("CallMessage")
_MAX_PAYLOAD_BYTES = _core.MAX_CONTROL_MESSAGE_BYTES - _HEADER.itemsize - _CALL.itemsize


class PeerGone(ConnectionError):
    """The other side of the control socket has closed it or died."""


class CallRefused(RuntimeError):
    """The other side answered a call with an error; its text says why."""

    def __init__(self, status: CallStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A CALL or RESULT as received."""

    kind: ControlKind
    call_id: int
    method: int
    status: int
    payload: Any


def _encode(kind: ControlKind, call_id: int, method: int, status: CallStatus, payload: object) -> bytes:
    body = json.dumps(payload, separators=(",", ":")).encode()
    if len(body) > _MAX_PAYLOAD_BYTES:
        raise ValueError(f"a control message of {len(body)} bytes: at most {_MAX_PAYLOAD_BYTES} fit into one packet")
    header = np.zeros((), _HEADER)
    header["magic"] = _core.CONTROL_MAGIC
    header["kind"] = kind
    header["layout_version"] = _core.LAYOUT_VERSION
    header["layout_hash"] = _core.LAYOUT_HASH
    header["pid"] = os.getpid()
    call = np.zeros((), _CALL)
    call["call_id"] = call_id
    call["method"] = method
    call["status"] = status
    call["payload_bytes"] = len(body)
    return header.tobytes() + call.tobytes() + body


def _decode(packet: bytes) -> ControlMessage:
    """Raises PeerCorrupt for anything that _encode does not write."""
    fixed = _HEADER.itemsize + _CALL.itemsize
    if len(packet) < fixed:
        raise _core.PeerCorrupt(f"control message of {len(packet)} bytes, needed at least {fixed}")
    header = np.frombuffer(packet, _HEADER, count=1)[0]
    call = np.frombuffer(packet, _CALL, count=1, offset=_HEADER.itemsize)[0]
    if header["magic"] != _core.CONTROL_MAGIC or header["layout_hash"] != _core.LAYOUT_HASH:
        raise _core.PeerCorrupt(
            f"control message with magic {int(header['magic']):#x}, layout hash {int(header['layout_hash']):#x}; "
            f"needed {_core.CONTROL_MAGIC:#x}, {_core.LAYOUT_HASH:#x}"
        )
    if header["kind"] not in (ControlKind.CALL, ControlKind.RESULT) or call["payload_bytes"] != len(packet) - fixed:
        raise _core.PeerCorrupt(f"control message of kind {int(header['kind'])} is no CALL or RESULT, or is cut short")
    try:
        payload = json.loads(packet[fixed:])
    except (ValueError, RecursionError) as error:
        raise _core.PeerCorrupt(f"control message without valid JSON: {error}") from None
    return ControlMessage(
        ControlKind(int(header["kind"])), int(call["call_id"]), int(call["method"]), int(call["status"]), payload
    )


def _receive(control: socket.socket) -> ControlMessage | None:
    """The next message, None if there is none now. Raises PeerGone at the end, PeerCorrupt on nonsense."""
    try:
        packet = control.recv(_core.MAX_CONTROL_MESSAGE_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError as error:
        raise PeerGone(f"the control socket failed: {error}") from error
    if not packet:
        raise PeerGone("the peer closed its control socket")
    return _decode(packet)


def _send(control: socket.socket, packet: bytes) -> None:
    """Raises PeerGone; BlockingIOError if the peer does not read its messages."""
    try:
        control.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BlockingIOError:
        raise
    except OSError as error:
        raise PeerGone(f"the control socket failed: {error}") from error


class ControlCaller:
    """The calling side (front end): one future per call; all pending ones fail when the peer dies."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._next_id = 1
        self._pending: dict[int, Future[Any]] = {}
        self._gone: PeerGone | None = None

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def call(self, method: ControlMethod, payload: object = None) -> Future[Any]:
        """Sends one call. The future ends with the result, CallRefused, PeerGone or BlockingIOError."""
        future: Future[Any] = Future()
        if self._gone is not None:
            future.set_exception(self._gone)
            return future
        call_id, self._next_id = self._next_id, self._next_id + 1
        try:
            _send(self._control, _encode(ControlKind.CALL, call_id, method, CallStatus.OK, payload))
        except (PeerGone, BlockingIOError) as error:
            future.set_exception(error)
            return future
        self._pending[call_id] = future
        return future

    def on_readable(self) -> bool:
        """Takes in every result that is there. False: the peer is gone or talks nonsense, all pending calls failed."""
        while self._gone is None:
            try:
                message = _receive(self._control)
            except (PeerGone, _core.PeerCorrupt) as error:
                self.fail_pending(error if isinstance(error, PeerGone) else PeerGone(str(error)))
                break
            if message is None:
                return True
            self._resolve(message)
        return False

    def fail_pending(self, error: PeerGone) -> None:
        """Fails every pending call and all later ones. Idempotent."""
        self._gone = self._gone or error
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)

    def _resolve(self, message: ControlMessage) -> None:
        future = self._pending.pop(message.call_id, None)
        if future is None or future.done():
            return  # cancelled by its caller
        if message.status == CallStatus.OK:
            future.set_result(message.payload)
        else:
            future.set_exception(CallRefused(CallStatus(message.status), str(message.payload)))


class Call:
    """One call to be answered by reply() or refuse(), now or later."""

    def __init__(self, control: socket.socket, message: ControlMessage) -> None:
        self._control = control
        self._id = message.call_id
        self.method: ControlMethod | int = message.method
        if message.method in ControlMethod.__members__.values():
            self.method = ControlMethod(message.method)
        self.payload = message.payload

    def reply(self, payload: object = None) -> None:
        """Raises PeerGone, or BlockingIOError if the caller does not read."""
        self._answer(CallStatus.OK, payload)

    def refuse(self, status: CallStatus, text: str) -> None:
        self._answer(status, text)

    def _answer(self, status: CallStatus, payload: object) -> None:
        _send(self._control, _encode(ControlKind.RESULT, self._id, int(self.method), status, payload))


def receive_calls(control: socket.socket, most: int = 16) -> list[Call]:
    """The answering side (engine): the calls that are there now, but of at most `most` messages.

    A peer that never stops calling must not hold us here. Raises PeerGone at EOF, PeerCorrupt on nonsense.
    """
    calls = []
    for _ in range(most):
        message = _receive(control)
        if message is None:
            break
        if message.kind == ControlKind.CALL:
            calls.append(Call(control, message))
    return calls
