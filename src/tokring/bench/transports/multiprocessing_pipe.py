"""multiprocessing.Pipe and multiprocessing.Queue: what the standard library offers."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import pickle
import queue
from typing import Any

from tokring.bench.case import Delivery, Waiting
from tokring.bench.payload import Payload, Rows
from tokring.bench.transports.base import Transport


class MultiprocessingPipe(Transport):
    label = "mp.Pipe"
    variants = ((Delivery.OBJECTS, Waiting.BLOCKING), (Delivery.OBJECTS, Waiting.POLLING))
    carries_requests = True

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        self._rows = payload.rows()
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)

    def open_writer(self) -> None:
        pass

    def send(self) -> bool:
        self._writer.send(self._rows)
        return True

    def num_bytes(self) -> int:
        return len(pickle.dumps(self._rows, pickle.DEFAULT_PROTOCOL))

    def open_reader(self) -> None:
        pass

    def receive(self) -> Any:
        return self._reader.recv()

    def try_receive(self) -> Any:
        return self._reader.recv() if self._reader.poll(0) else None

    def rows(self, delivered: Any) -> Rows:
        return list(delivered)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class MultiprocessingQueue(Transport):
    label = "mp.Queue"
    variants = ((Delivery.OBJECTS, Waiting.BLOCKING), (Delivery.OBJECTS, Waiting.POLLING))

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        self._rows = payload.rows()
        self._queue: multiprocessing.queues.Queue[Any] = multiprocessing.get_context("fork").Queue()

    def open_writer(self) -> None:
        pass

    def send(self) -> bool:
        self._queue.put(self._rows)
        return True

    def num_bytes(self) -> int:
        return len(pickle.dumps(self._rows, pickle.DEFAULT_PROTOCOL))

    def open_reader(self) -> None:
        pass

    def receive(self) -> Any:
        return self._queue.get()

    def try_receive(self) -> Any:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def rows(self, delivered: Any) -> Rows:
        return list(delivered)

    def close(self) -> None:
        self._queue.close()
        self._queue.join_thread()
