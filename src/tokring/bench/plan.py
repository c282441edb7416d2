"""What a run of `tokring bench ipc` measures: variants x cases x regimes, all of it or the quick part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokring.bench.case import (
    AT_ONCE,
    CLOSED,
    HOT,
    PACED_1MS,
    PACED_10MS,
    SATURATED,
    Case,
    Delivery,
    Direction,
    Regime,
    Waiting,
    idle,
)
from tokring.bench.payload import expected_us
from tokring.bench.transports import REQUEST_TRANSPORTS, STEP_TRANSPORTS, Variant, available

BATCHES = (1, 8, 64, 256, 1024)
PROMPTS = (128, 4096, 131_072)
NUM_LOGPROBS = 5


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of it."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    paced_everything: bool
    repetitions: int
    seconds_per_run: float
    idle_s: float


FULL = Extent(batches=BATCHES, prompts=PROMPTS, paced_everything=True, repetitions=5, seconds_per_run=0.3, idle_s=3.0)
# Hot and closed at batch 1 and 256, and what the ratios need beside that.
QUICK = Extent(
    batches=(1, 256), prompts=(131_072,), paced_everything=False, repetitions=3, seconds_per_run=0.025, idle_s=1.0
)


@dataclass(frozen=True, slots=True)
class Item:
    """One row to be."""

    variant: Variant
    case: Case
    regime: Regime
    num_steps: int


def make_plan(extent: Extent) -> tuple[list[Item], dict[str, str]]:
    """Items in the order in which one repetition runs them, and which transports are missing, why."""
    steps, missing = available(STEP_TRANSPORTS)
    requests, missing_too = available(REQUEST_TRANSPORTS)
    items: dict[Item, None] = {}  # a set in order
    for item in (*_step_items(steps, extent), *_request_items(requests, extent)):
        items[item] = None
    return list(items), missing | missing_too


def _step_items(variants: list[Variant], extent: Extent) -> Iterator[Item]:
    # The bound at every batch: cheap. Ring and bound side by side: where a virtual machine's two cores lie changes from
    # one second to the next (two threads of one core or not), and with it both by a factor of three.
    for batch in BATCHES:
        for variant in variants:
            if variant.key in _NATIVE:
                yield _item(variant, Case(Direction.STEP, batch), HOT, extent)
    cases = [Case(Direction.STEP, batch, logprobs) for logprobs in (0, NUM_LOGPROBS) for batch in extent.batches]
    for case in cases:
        for variant in variants:
            yield _item(variant, case, HOT if variant.waiting == Waiting.POLLING else CLOSED, extent)
    if extent.paced_everything:
        for case in (Case(Direction.STEP, 1), Case(Direction.STEP, 256), Case(Direction.STEP, 256, NUM_LOGPROBS)):
            for variant in variants:
                if variant.key in _PACED:
                    yield _item(variant, case, AT_ONCE, extent)
    at_256 = Case(Direction.STEP, 256)
    for variant in variants:
        if variant.key in _COMPARED:
            yield _item(variant, Case(Direction.STEP, 1024, NUM_LOGPROBS), CLOSED, extent)
        sleeps = variant.waiting != Waiting.POLLING
        if sleeps and (extent.paced_everything or variant.key in _PACED):
            yield _item(variant, at_256, PACED_1MS, extent)
        if sleeps and extent.paced_everything:
            yield _item(variant, at_256, PACED_10MS, extent)
        if variant.key in _SATURATED or (extent.paced_everything and variant.transport.label not in _NOT_STREAMING):
            yield _item(variant, at_256, SATURATED, extent)
        if sleeps and (extent.paced_everything or variant.key in _PACED):
            yield Item(variant, Case(Direction.STEP, 1), idle(extent.idle_s), 1)


def _request_items(variants: list[Variant], extent: Extent) -> Iterator[Item]:
    for num_ids in extent.prompts:
        for variant in variants:
            case = Case(Direction.REQUEST, num_ids)
            if variant.waiting == Waiting.BLOCKING:
                yield _item(variant, case, CLOSED, extent)


def _item(variant: Variant, case: Case, regime: Regime, extent: Extent) -> Item:
    """With as many steps as fill the time of a run, about."""
    slow = variant.transport.label not in _FAST
    step_us = expected_us(case, variant.delivery if slow else Delivery.COLUMNS) + regime.sleep_ns / 1000
    if variant.key in _NATIVE:
        step_us = 0.5 if regime is SATURATED else 10
    return Item(variant, case, regime, max(15, int(extent.seconds_per_run * 1e6 / step_us)))


_FAST = {"ring", "doorbell alone", "memcpy", "cache line"}
_NOT_STREAMING = {"doorbell alone", "memcpy", "cache line"}  # nothing to be saturated, or one step at a time
_NATIVE = {
    ("ring", Delivery.BYTES, Waiting.POLLING),
    ("memcpy", Delivery.BYTES, Waiting.POLLING),
    ("cache line", Delivery.BYTES, Waiting.POLLING),
}
_COMPARED = {("ring", Delivery.COLUMNS, Waiting.UVLOOP), ("seqpacket", Delivery.COLUMNS, Waiting.UVLOOP)}
_PACED = {
    ("ring", Delivery.COLUMNS, Waiting.UVLOOP),
    ("msgpack+zmq", Delivery.OBJECTS, Waiting.UVLOOP),
    ("doorbell alone", Delivery.BYTES, Waiting.UVLOOP),
}
_SATURATED = {
    ("ring", Delivery.BYTES, Waiting.POLLING),
    ("ring", Delivery.OBJECTS, Waiting.UVLOOP),
    ("msgpack+zmq", Delivery.OBJECTS, Waiting.UVLOOP),
}
