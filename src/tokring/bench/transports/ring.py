"""The rings, as front end and engine use them."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from tokring.bench import _native
from tokring.bench.case import Case, Delivery, Regime, Waiting
from tokring.bench.payload import Payload, RequestPayload, Rows, StepPayload, rows_of_columns
from tokring.bench.track import ReaderTrack, WriterTrack
from tokring.bench.transports.base import Transport
from tokring_ipc import (
    REQUEST_DTYPE,
    EngineChannel,
    Frame,
    FrontEndChannel,
    req_ring_bytes,
    request_frame_bytes,
    step_bytes,
)

OUT_BYTES = 4 << 20
NUM_STREAM_SLOTS = 2048
RECHECK_S = 0.25  # as front end and engine do
ATTACH_TIMEOUT_S = 30.0


class Wiring:
    """What the supervisor makes for a channel: a control socketpair and two doorbell pipes."""

    def __init__(self) -> None:
        self.engine_control, self.frontend_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.req_doorbell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.out_doorbell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def accept(self) -> EngineChannel:
        return EngineChannel.accept(
            self.engine_control, self.req_doorbell[0], self.out_doorbell[1], timeout_s=ATTACH_TIMEOUT_S
        )

    def connect(self, max_ids: int) -> FrontEndChannel:
        return FrontEndChannel.connect(
            self.frontend_control,
            self.req_doorbell[1],
            self.out_doorbell[0],
            req_bytes=req_ring_bytes(max_ids),
            out_bytes=OUT_BYTES,
            num_stream_slots=NUM_STREAM_SLOTS,
            timeout_s=ATTACH_TIMEOUT_S,
        )

    def close(self) -> None:
        self.engine_control.close()
        self.frontend_control.close()
        for fd in (*self.req_doorbell, *self.out_doorbell):
            os.close(fd)


def frame_bytes(case: Case) -> int:
    """Of the STEP frame that carries this case."""
    logprob_rows = case.size if case.num_logprobs else 0
    return step_bytes(case.size, num_logprob_rows=logprob_rows, logprobs_width=case.num_logprobs)


class RingSteps(Transport):
    """OUT ring: write_step, publish, ring on one side; poll, columns, release on the other."""

    label = "ring"
    variants = (
        (Delivery.COLUMNS, Waiting.UVLOOP),
        (Delivery.COLUMNS, Waiting.POLLING),
        (Delivery.COLUMNS, Waiting.BLOCKING),
        (Delivery.OBJECTS, Waiting.UVLOOP),
        (Delivery.OBJECTS, Waiting.POLLING),
    )

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        assert isinstance(payload, StepPayload)
        self._wiring = Wiring()
        self._step: tuple[Any, ...] = payload.columns()[:3]
        self._logprobs: dict[str, Any] = {}
        if payload.case.num_logprobs:
            names = ("logprob_token_index", "logprob_rank", "logprob", "top_id", "top_logprob")
            self._logprobs = dict(zip(names, payload.columns()[3:], strict=True))
        self._take: Callable[[Frame], Any] = Frame.columns if delivery == Delivery.COLUMNS else Frame.rows

    def open_writer(self) -> None:
        self._engine = self._wiring.accept()

    def send(self) -> bool:
        engine = self._engine
        if not engine.write_step(*self._step, **self._logprobs):
            return False
        engine.publish()
        engine.ring()
        return True

    def num_bytes(self) -> int:
        return frame_bytes(self.payload.case)

    def counters(self) -> dict[str, int]:
        counted = self._engine.counters
        return {name: counted[name] for name in ("doorbells_sent", "doorbells_suppressed")}

    def open_reader(self) -> None:
        self._frontend = self._wiring.connect(1)
        self._doorbell = select.poll()
        self._doorbell.register(self._frontend.out_doorbell_fd, select.POLLIN)
        self._polled = False

    def try_receive(self) -> Any:
        # The frame before stays valid until here: released when its consumer comes back for more.
        if self._polled:
            self._frontend.release()
            self._polled = False
        frame = self._frontend.poll()
        if frame is None:
            return None
        self._polled = True
        return self._take(frame)

    def receive(self) -> Any:
        while (delivered := self.try_receive()) is None:
            if self._frontend.arm():
                self._doorbell.poll(RECHECK_S * 1000)
                self._frontend.drain_doorbell()
        return delivered

    async def attach(self, deliver: Callable[[Any], None]) -> None:
        frontend, take = self._frontend, self._take
        loop = asyncio.get_running_loop()

        def on_doorbell() -> None:
            # As the front end does: frames need not wait until the doorbell is drained. Then one more look, as ever.
            rung = True
            while True:
                while (frame := frontend.poll()) is not None:
                    deliver(take(frame))
                frontend.release()
                if rung:
                    frontend.drain_doorbell()
                    rung = False
                elif frontend.arm():
                    return

        def recheck() -> None:
            on_doorbell()
            loop.call_later(RECHECK_S, recheck)

        loop.add_reader(frontend.out_doorbell_fd, on_doorbell)
        recheck()

    def rows(self, delivered: Any) -> Rows:
        return rows_of_columns(delivered) if self.delivery == Delivery.COLUMNS else list(delivered)

    def close(self) -> None:
        for name in ("_engine", "_frontend"):
            if name in self.__dict__:
                getattr(self, name).close()
        self._wiring.close()


class NativeRingSteps(Transport):
    """The same ring with C++ on both sides: what a native consumer (the token path) pays."""

    label = "ring"
    variants = ((Delivery.BYTES, Waiting.POLLING),)

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        assert isinstance(payload, StepPayload)
        self._step = payload
        self._wiring = Wiring()

    def open_writer(self) -> None:
        step, wiring = self._step, self._wiring
        source = _native.StepSource.of(
            step.stream_slot,
            step.slot_generation,
            step.token_id,
            step.token_index,
            step.rank,
            step.logprob,
            step.top_id.ravel(),
            step.top_logprob.ravel(),
        )
        self._writer = _native.RingWriterLoop(
            wiring.engine_control.fileno(), wiring.req_doorbell[0], wiring.out_doorbell[1], source
        )

    def send(self) -> bool:
        raise NotImplementedError("write() has the whole loop")

    def num_bytes(self) -> int:
        return frame_bytes(self.payload.case)

    def counters(self) -> dict[str, int]:
        return {
            "doorbells_sent": self._writer.doorbells_sent,
            "doorbells_suppressed": self._writer.doorbells_suppressed,
        }

    def write(self, track: WriterTrack, regime: Regime, first: int, last: int) -> None:
        board = track.board
        self._writer.run(board.sent, board.acknowledged, first, last, regime.closed, regime.settle_ns)

    def open_reader(self) -> None:
        wiring = self._wiring
        self._reader = _native.RingReaderLoop(
            wiring.frontend_control.fileno(), wiring.req_doorbell[1], wiring.out_doorbell[0], OUT_BYTES
        )

    def read(self, track: ReaderTrack) -> None:
        track.read_natively(self._reader.run)

    def rows(self, delivered: Any) -> Rows:
        """`delivered` is the sum of a step's 64-bit words behind the frame header."""
        return self._step.rows() if delivered == self._word_sum() else [("sum of all words", delivered)]

    def _word_sum(self) -> int:
        data = b"".join(column.tobytes() for column in self._step.columns()[:3])
        if self._step.case.num_logprobs:
            logprobs = b"".join(column.tobytes() for column in self._step.columns()[3:])
            data = data.ljust(-(-(len(data) + 32) // 8) * 8 - 32, b"\0")
            padded = -(-len(logprobs) // 8) * 8
            section = np.array([2, self._step.case.num_logprobs], np.uint16).tobytes()
            section += np.array([self._step.case.size, padded, 0], np.uint32).tobytes()
            data += section + logprobs
        data = data.ljust(-(-len(data) // 8) * 8, b"\0")
        return int(np.frombuffer(data, np.uint64).sum(dtype=np.uint64))

    def close(self) -> None:
        self.__dict__.pop("_writer", None)
        self.__dict__.pop("_reader", None)
        self._wiring.close()


class RingRequests(Transport):
    """REQ ring: submit on the front end's side; the engine copies the frame, checks it and looks at every id."""

    label = "ring"
    variants = ((Delivery.COLUMNS, Waiting.BLOCKING),)
    carries_requests = True

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        assert isinstance(payload, RequestPayload)
        self._ids = payload.ids
        self._wiring = Wiring()
        self._record = np.zeros(1, REQUEST_DTYPE)
        self._record["slot_generation"] = 1
        self._record["max_tokens"] = 16

    def open_writer(self) -> None:
        self._frontend = self._wiring.connect(self._ids.size)

    def send(self) -> bool:
        return self._frontend.submit(self._record, self._ids)

    def num_bytes(self) -> int:
        return request_frame_bytes(self._ids.size, 0)

    def counters(self) -> dict[str, int]:
        counted = self._frontend.counters
        return {name: counted[name] for name in ("doorbells_sent", "doorbells_suppressed")}

    def open_reader(self) -> None:
        self._engine = self._wiring.accept()
        self._doorbell = select.poll()
        self._doorbell.register(self._engine.req_doorbell_fd, select.POLLIN)

    def receive(self) -> Any:
        engine = self._engine
        while (request := engine.poll_request()) is None:
            if engine.arm_requests():
                self._doorbell.poll(RECHECK_S * 1000)
                engine.drain_doorbell()
        engine.release_requests()
        least, _ = request.id_range
        if least < 0:
            raise ValueError("a negative id: intake would refuse this request")
        return request.ids

    def rows(self, delivered: Any) -> Rows:
        return [(0, delivered.tolist())]

    def close(self) -> None:
        for name in ("_engine", "_frontend"):
            if name in self.__dict__:
                getattr(self, name).close()
        self._wiring.close()
