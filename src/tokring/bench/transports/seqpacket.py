"""The columns of a STEP frame in one packet of a Unix SEQPACKET socket: the layout without the ring."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from tokring.bench.case import Case, Delivery, Waiting
from tokring.bench.payload import Payload, Rows, StepPayload, rows_of_columns
from tokring.bench.transports.base import Transport
from tokring_ipc import FRAME_HEADER_DTYPE

MAX_PACKET_BYTES = 1 << 18


class PackedColumns:
    """Header and columns of one step as bytes, and back as views."""

    def __init__(self, payload: StepPayload) -> None:
        self._header = np.zeros(1, FRAME_HEADER_DTYPE)
        self._header["count"] = payload.case.size
        self._columns = payload.columns()
        self.num_bytes = self._header.nbytes + sum(column.nbytes for column in self._columns)
        self._header["length"] = self.num_bytes
        self._case = payload.case

    def parts(self) -> list[Any]:
        return [self._header, *self._columns]

    def views(self, data: Any) -> tuple[Any, ...]:
        """Columns of the step in `data`, nothing copied. The count is read from the header, as a reader must."""
        return column_views(data, self._case)


def column_views(data: Any, case: Case) -> tuple[Any, ...]:
    rows = int(np.frombuffer(data, np.uint32, 1, 24)[0])
    at = FRAME_HEADER_DTYPE.itemsize
    column = 4 * rows
    ids = (
        np.frombuffer(data, np.uint32, rows, at),
        np.frombuffer(data, np.uint32, rows, at + column),
        np.frombuffer(data, np.int32, rows, at + 2 * column),
    )
    width = case.num_logprobs
    if not width:
        return ids
    at += 3 * column
    return (
        *ids,
        np.frombuffer(data, np.uint32, rows, at),
        np.frombuffer(data, np.int32, rows, at + column),
        np.frombuffer(data, np.float32, rows, at + 2 * column),
        np.frombuffer(data, np.int32, rows * width, at + 3 * column).reshape(rows, width),
        np.frombuffer(data, np.float32, rows * width, at + (3 + width) * column).reshape(rows, width),
    )


class Seqpacket(Transport):
    label = "seqpacket"
    variants = (
        (Delivery.COLUMNS, Waiting.UVLOOP),
        (Delivery.COLUMNS, Waiting.BLOCKING),
        (Delivery.COLUMNS, Waiting.POLLING),
        (Delivery.OBJECTS, Waiting.UVLOOP),
    )

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        assert isinstance(payload, StepPayload)
        self._packed = PackedColumns(payload)
        self._writer, self._reader = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def open_writer(self) -> None:
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

    def send(self) -> bool:
        self._writer.sendmsg(self._packed.parts())
        return True

    def num_bytes(self) -> int:
        return self._packed.num_bytes

    def open_reader(self) -> None:
        self._buffer = bytearray(MAX_PACKET_BYTES)

    def receive(self) -> Any:
        self._reader.recv_into(self._buffer)
        return self._take()

    def try_receive(self) -> Any:
        try:
            self._reader.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        return self._take()

    async def attach(self, deliver: Callable[[Any], None]) -> None:
        self._reader.setblocking(False)

        def on_readable() -> None:
            deliver(self.receive())

        asyncio.get_running_loop().add_reader(self._reader.fileno(), on_readable)

    def _take(self) -> Any:
        columns = self._packed.views(self._buffer)
        return columns if self.delivery == Delivery.COLUMNS else rows_of_columns(columns)

    def rows(self, delivered: Any) -> Rows:
        return rows_of_columns(delivered) if self.delivery == Delivery.COLUMNS else list(delivered)

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
