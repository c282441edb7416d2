"""JSON (orjson) over a Unix stream socket, length first."""

from __future__ import annotations

import socket
import struct
from typing import Any

import orjson

from tokring.bench.case import Delivery, Waiting
from tokring.bench.payload import Payload, Rows
from tokring.bench.transports.base import Transport

LENGTH = struct.Struct("<I")


class UnixOrjson(Transport):
    label = "unix+orjson"
    variants = ((Delivery.OBJECTS, Waiting.BLOCKING), (Delivery.OBJECTS, Waiting.POLLING))
    carries_requests = True

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        self._rows = payload.rows()
        self._writer, self._reader = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def open_writer(self) -> None:
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

    def send(self) -> bool:
        data = orjson.dumps(self._rows)
        self._writer.sendall(LENGTH.pack(len(data)) + data)
        return True

    def num_bytes(self) -> int:
        return LENGTH.size + len(orjson.dumps(self._rows))

    def open_reader(self) -> None:
        pass

    def receive(self) -> Any:
        return self._rest(self._reader.recv(LENGTH.size, socket.MSG_WAITALL))

    def try_receive(self) -> Any:
        try:
            return self._rest(self._reader.recv(LENGTH.size, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return None

    def _rest(self, length: bytes) -> Any:
        data = bytearray(LENGTH.unpack(length)[0])
        view = memoryview(data)
        while view:
            view = view[self._reader.recv_into(view) :]
        return orjson.loads(data)

    def rows(self, delivered: Any) -> Rows:
        return [tuple(row) for row in delivered]

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
