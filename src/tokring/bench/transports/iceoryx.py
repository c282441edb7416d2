"""The packed columns through iceoryx2's Python binding: a shared-memory middleware with zero-copy slices."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import iceoryx2

from tokring.bench.case import Delivery, Waiting
from tokring.bench.payload import Payload, Rows, StepPayload, rows_of_columns
from tokring.bench.transports.base import Transport
from tokring.bench.transports.seqpacket import MAX_PACKET_BYTES, PackedColumns

BUFFERED_STEPS = 64


class Iceoryx(Transport):
    """Blocking: publish and notify, wait on a listener. Polling: publish only."""

    label = "iceoryx2"
    variants = ((Delivery.COLUMNS, Waiting.BLOCKING), (Delivery.COLUMNS, Waiting.POLLING))

    def __init__(self, payload: Payload, delivery: Delivery, waiting: Waiting) -> None:
        super().__init__(payload, delivery, waiting)
        assert isinstance(payload, StepPayload)
        self._packed = PackedColumns(payload)
        self._name = f"tokring-bench-{os.getpid()}-{time.monotonic_ns()}"
        self._sample: Any = None

    def _open(self) -> None:
        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        self._node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        self._data = (
            self._node.service_builder(iceoryx2.ServiceName.new(self._name))
            .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(BUFFERED_STEPS)
            .open_or_create()
        )
        self._event = (
            self._node.service_builder(iceoryx2.ServiceName.new(self._name + "/event")).event().open_or_create()
        )

    def open_writer(self) -> None:
        self._open()
        self._publisher = self._data.publisher_builder().initial_max_slice_len(MAX_PACKET_BYTES).create()
        self._notifier = self._event.notifier_builder().create()

    def send(self) -> bool:
        data = b"".join(self._packed.parts())
        sample = self._publisher.loan_slice_uninit(len(data))
        ctypes.memmove(sample.payload().as_ptr(), data, len(data))
        sample.assume_init().send()
        if self.waiting == Waiting.BLOCKING:
            self._notifier.notify()
        return True

    def num_bytes(self) -> int:
        return self._packed.num_bytes

    def open_reader(self) -> None:
        self._open()
        self._subscriber = self._data.subscriber_builder().create()
        self._listener = self._event.listener_builder().create()

    def try_receive(self) -> Any:
        if self._sample is not None:  # its columns were valid until here
            self._sample.delete()
        self._sample = self._subscriber.receive()
        if self._sample is None:
            return None
        payload = self._sample.payload()
        address = ctypes.cast(payload.as_ptr(), ctypes.c_void_p).value
        return self._packed.views((ctypes.c_uint8 * payload.len()).from_address(address))

    def receive(self) -> Any:
        while (columns := self.try_receive()) is None:
            self._listener.timed_wait(iceoryx2.Duration.from_secs(1))
        return columns

    def rows(self, delivered: Any) -> Rows:
        return rows_of_columns(delivered)

    def close(self) -> None:
        for name in ("_publisher", "_subscriber", "_listener", "_notifier", "_event", "_data", "_node"):
            self.__dict__.pop(name, None)
