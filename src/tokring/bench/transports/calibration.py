"""What the machine itself takes: the doorbell without data, a copy of the same bytes, one cache line to and fro."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from tokring.bench import _native
from tokring.bench.board import Word
from tokring.bench.case import Delivery, Regime, Waiting
from tokring.bench.payload import Payload, Rows, StepPayload
from tokring.bench.track import ReaderTrack, WriterTrack
from tokring.bench.transports.base import Transport
from tokring.bench.transports.ring import OUT_BYTES, frame_bytes


class Doorbell(Transport):
    """One byte through a pipe: what waking the reader costs whoever sends whatever."""

    label = "doorbell alone"
    variants = ((Delivery.BYTES, Waiting.UVLOOP), (Delivery.BYTES, Waiting.BLOCKING))

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)

    def open_writer(self) -> None:
        pass

    def num_bytes(self) -> int:
        return 1

    def send(self) -> bool:
        os.write(self._writer, b"\1")
        return True

    def open_reader(self) -> None:
        pass

    def receive(self) -> Any:
        return os.read(self._reader, 1)

    async def attach(self, deliver: Callable[[Any], None]) -> None:
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, lambda: deliver(os.read(self._reader, 1)))

    def rows(self, delivered: Any) -> Rows:
        return self.payload.rows() if delivered == b"\1" else []

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Memcpy(Transport):
    """The bytes of the ring's frame copied into shared memory by one core and out of it by another."""

    label = "memcpy"
    variants = ((Delivery.BYTES, Waiting.POLLING),)

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        assert isinstance(payload, StepPayload)
        self._area = np.frombuffer(mmap.mmap(-1, OUT_BYTES), np.uint8)
        self._area[:] = 0  # touch every page

    def num_bytes(self) -> int:
        return frame_bytes(self.payload.case)

    def open_writer(self) -> None:
        pass

    def send(self) -> bool:
        raise NotImplementedError("write() has the whole loop")

    def write(self, track: WriterTrack, regime: Regime, first: int, last: int) -> None:
        board = track.board
        copy = _native.CopyLoop(self._area, board.word(Word.PUBLISHED), self.num_bytes())
        copy.write(board.sent, board.acknowledged, first, last, regime.settle_ns)

    def open_reader(self) -> None:
        pass

    def read(self, track: ReaderTrack) -> None:
        copy = _native.CopyLoop(self._area, track.board.word(Word.PUBLISHED), self.num_bytes())
        track.read_natively(copy.read)

    def rows(self, delivered: Any) -> Rows:
        return self.payload.rows()

    def close(self) -> None:
        pass


class PingPong(Memcpy):
    """Nothing copied: the published word's cache line alone."""

    label: ClassVar[str] = "cache line"

    def num_bytes(self) -> int:
        return 0
