"""pickle over ZeroMQ (send_pyobj), as SGLang's processes talk."""

from __future__ import annotations

import os
import pickle
from typing import Any

import zmq

from tokring.bench.case import Delivery, Waiting
from tokring.bench.payload import Payload, Rows
from tokring.bench.transports.base import Transport
from tokring.bench.transports.zmq_msgpack import bind_pull, connect_push, unique_address


class PickleZmq(Transport):
    label = "pickle+zmq"
    variants = ((Delivery.OBJECTS, Waiting.BLOCKING), (Delivery.OBJECTS, Waiting.POLLING))
    carries_requests = True

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        self._address = unique_address()
        self._rows = payload.rows()
        self._socket: Any = None

    def open_writer(self) -> None:
        self._socket = connect_push(self._address)

    def send(self) -> bool:
        self._socket.send_pyobj(self._rows)
        return True

    def num_bytes(self) -> int:
        return len(pickle.dumps(self._rows, pickle.DEFAULT_PROTOCOL))

    def open_reader(self) -> None:
        self._socket = bind_pull(zmq.Context(), self._address)

    def receive(self) -> Any:
        return self._socket.recv_pyobj()

    def try_receive(self) -> Any:
        try:
            return self._socket.recv_pyobj(zmq.NOBLOCK)
        except zmq.Again:
            os.sched_yield()  # the I/O thread lives on this core too
            return None

    def rows(self, delivered: Any) -> Rows:
        return list(delivered)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
