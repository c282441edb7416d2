"""msgpack over ZeroMQ, as vLLM's engine and front end talk."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from tokring.bench.case import Delivery, Waiting
from tokring.bench.payload import Payload, Rows
from tokring.bench.transports.base import Transport
from tokring.bench.vllm_messages import definitions

RECONNECT_MS = 1  # who connects first must not wait for libzmq's 100 ms


def unique_address() -> str:
    """An address in Linux's abstract namespace: no file is left behind."""
    return f"ipc://@tokring-bench-{os.getpid()}-{time.monotonic_ns()}"


def connect_push(address: str) -> zmq.Socket[bytes]:
    socket = zmq.Context().socket(zmq.PUSH)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.connect(address)
    return socket


def bind_pull(context: Any, address: str) -> Any:
    socket = context.socket(zmq.PULL)
    socket.set(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


class MsgpackZmq(Transport):
    """uvloop: a queue and an output thread in the engine; zmq.asyncio, a task and an asyncio.Queue in the front end.

    Blocking and polling: encoded and sent inline, received in a plain loop: cheaper than what vLLM does.
    """

    label = "msgpack+zmq"
    variants = (
        (Delivery.OBJECTS, Waiting.UVLOOP),
        (Delivery.OBJECTS, Waiting.BLOCKING),
        (Delivery.OBJECTS, Waiting.POLLING),
    )
    carries_requests = True

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        self._address = unique_address()
        self._message = payload.message()
        self._socket: Any = None
        self._output_thread: threading.Thread | None = None

    def open_writer(self) -> None:
        self._socket = connect_push(self._address)
        self._encoder = definitions().encoder()
        self._buffer = bytearray()
        self._queue: queue.Queue[Any] = queue.Queue()
        if self.waiting == Waiting.UVLOOP:
            self._output_thread = threading.Thread(target=self._send_queued)
            self._output_thread.start()

    def send(self) -> bool:
        if self.waiting == Waiting.UVLOOP:
            self._queue.put_nowait(self._message)
        else:
            self._send(self._message)
        return True

    def _send_queued(self) -> None:
        while (message := self._queue.get()) is not None:
            self._send(message)

    def _send(self, message: Any) -> None:
        frames = self._encoder.encode_into(message, self._buffer)
        tracker = self._socket.send_multipart(frames, copy=False, track=True)
        if not tracker.done:  # ZeroMQ still reads the buffer: the next message takes another, as in vLLM
            self._buffer = bytearray()

    def num_bytes(self) -> int:
        frames = definitions().encoder().encode_into(self._message, bytearray())
        return sum(memoryview(frame).nbytes for frame in frames)

    def open_reader(self) -> None:
        self._decoder = definitions().decoder(self.payload.message_type())
        context = zmq.asyncio.Context() if self.waiting == Waiting.UVLOOP else zmq.Context()
        self._context = context
        if self.waiting != Waiting.UVLOOP:
            self._socket = bind_pull(context, self._address)

    def receive(self) -> Any:
        return self._decoder.decode(self._socket.recv_multipart(copy=False))

    def try_receive(self) -> Any:
        try:
            frames = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            os.sched_yield()  # the I/O thread lives on this core too
            return None
        return self._decoder.decode(frames)

    async def attach(self, deliver: Callable[[Any], None]) -> None:
        self._socket = bind_pull(self._context, self._address)
        outputs: asyncio.Queue[Any] = asyncio.Queue()

        async def receive_outputs() -> None:
            while True:
                frames = await self._socket.recv_multipart(copy=False)
                outputs.put_nowait(self._decoder.decode(frames))

        async def handle_outputs() -> None:
            while True:
                deliver(await outputs.get())

        self._tasks = [asyncio.create_task(receive_outputs()), asyncio.create_task(handle_outputs())]

    def rows(self, delivered: Any) -> Rows:
        return self.payload.rows_of_message(delivered)

    def close(self) -> None:
        if self._output_thread is not None:
            self._queue.put_nowait(None)
            self._output_thread.join()
        if self._socket is not None:
            self._socket.close(linger=0)
