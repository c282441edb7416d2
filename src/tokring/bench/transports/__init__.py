"""All transports; what needs a package that is not installed is left out, and said so."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from tokring.bench.case import Delivery, Waiting
from tokring.bench.payload import Payload
from tokring.bench.transports.base import Transport

STEP_TRANSPORTS = (
    "ring.NativeRingSteps",
    "ring.RingSteps",
    "zmq_msgpack.MsgpackZmq",
    "zmq_pickle.PickleZmq",
    "multiprocessing_pipe.MultiprocessingPipe",
    "multiprocessing_pipe.MultiprocessingQueue",
    "unix_orjson.UnixOrjson",
    "seqpacket.Seqpacket",
    "iceoryx.Iceoryx",
    "calibration.Doorbell",
    "calibration.Memcpy",
    "calibration.PingPong",
)
REQUEST_TRANSPORTS = (
    "ring.RingRequests",
    "zmq_msgpack.MsgpackZmq",
    "zmq_pickle.PickleZmq",
    "multiprocessing_pipe.MultiprocessingPipe",
    "unix_orjson.UnixOrjson",
)


class Variant(NamedTuple):
    """A transport with one way of delivering and one of waiting."""

    transport: type[Transport]
    delivery: Delivery
    waiting: Waiting

    def build(self, payload: Payload) -> Transport:
        return self.transport(payload, self.delivery, self.waiting)

    @property
    def key(self) -> tuple[str, Delivery, Waiting]:
        return self.transport.label, self.delivery, self.waiting


def available(names: tuple[str, ...]) -> tuple[list[Variant], dict[str, str]]:
    """Variants of these transports, and for each that is missing why."""
    variants: list[Variant] = []
    missing: dict[str, str] = {}
    for name in names:
        module, attribute = name.split(".")
        try:
            transport: type[Transport] = getattr(import_module(f"{__name__}.{module}"), attribute)
        except ImportError as error:
            missing[attribute] = f"{error}: pip install 'tokring[bench]'"
            continue
        variants += [Variant(transport, delivery, waiting) for delivery, waiting in transport.variants]
    return variants, missing
