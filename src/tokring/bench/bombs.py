"""Streams beside grammars that explode: a server with made-up steps, 32 streams, and requests that must be refused.

Phases without and with bombs alternate; a pair gives one ratio of the streams' inter-token latencies (p99).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson

from tokring.bench import _native
from tokring.bench.frontend.servers import BenchError, Server, start_tokring, stream_request

NUM_STREAMS = 32
STEP_MS = 10.0
BOMBS_AT_ONCE = 4
LEAST_EVENTS = 10  # of each stream in a phase, however short
MAX_TOKENS = 6000  # a minute of made-up steps: longer than a phase
TIMEOUT_S = 120.0


def bombs() -> dict[str, dict[str, Any]]:
    """By name: request fields with a grammar that no server should compile."""
    circle = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    alternatives = [
        {"anyOf": [{"type": "object", "properties": {f"k{i}{j}": {"type": "string"}}} for j in range(6)]}
        for i in range(10)
    ]
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(5000)}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    return {
        "a megabyte of grammar": {"structured_outputs": {"grammar": 'start: "' + "a" * 1_000_000 + '"'}},
        "a megabyte of regex": {"structured_outputs": {"regex": "a" * 1_000_000}},
        "a schema that is itself": _schema({"$ref": "#"}),
        "a circle of references": _schema(circle),
        "a product of alternatives": _schema({"allOf": alternatives}),
        "5,000 optional properties": _schema(wide),
        "a huge multiple": _schema({"type": "integer", "multipleOf": 999983}),
        "deep nesting": _schema({"allOf": [deep, {"$ref": "#"}]}),
        "a regex of nested counts": {"structured_outputs": {"regex": "(([a-z]{1,100}){1,100}){1,100}"}},
        "a regex of parentheses": {"structured_outputs": {"regex": "(" * 2000 + "a" + ")" * 2000}},
        "a rule that never ends": {"structured_outputs": {"grammar": 'start: a\na: "x" a\n'}},
    }


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema}}


@dataclass(slots=True)
class Refusal:
    """How one bomb was answered."""

    name: str
    status: int
    seconds: float
    message: str


@dataclass(slots=True)
class Outcome:
    """What was measured: one entry of the lists for each pair of phases."""

    p99_without_ms: list[float] = field(default_factory=list)
    p99_with_ms: list[float] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    num_broken_streams: int = 0  # that ended, or brought an error

    @property
    def ratios(self) -> list[float]:
        """p99 with bombs over p99 without, pair by pair."""
        return [b / a for a, b in zip(self.p99_without_ms, self.p99_with_ms, strict=True)]

    def summary(self) -> dict[str, Any]:
        """What --json writes."""
        names = sorted({refusal.name for refusal in self.refusals})
        by_name = {name: [r for r in self.refusals if r.name == name] for name in names}
        return {
            "itl_p99_ratio": round(float(np.median(self.ratios)), 3),
            "ratios": [round(ratio, 3) for ratio in self.ratios],
            "itl_p99_without_ms": [round(value, 2) for value in self.p99_without_ms],
            "itl_p99_with_ms": [round(value, 2) for value in self.p99_with_ms],
            "num_broken_streams": self.num_broken_streams,
            "bombs": {
                name: {
                    "sent": len(refusals),
                    "statuses": sorted({refusal.status for refusal in refusals}),
                    "message": refusals[-1].message,
                    "slowest_s": round(max(refusal.seconds for refusal in refusals), 2),
                }
                for name, refusals in by_name.items()
            },
        }


def start_server(model: str | None) -> Server:
    """With made-up steps. Raises BenchError if it does not start."""
    return start_tokring(STEP_MS, NUM_STREAMS, *(("--model", model) if model else ()))


def measure(port: int, *, num_pairs: int, phase_s: float, names: Collection[str] | None = None) -> Outcome:
    """Pairs of phases of phase_s each; then every bomb (of `names`, all by default) has been sent at least once.

    The bombs come from a process of their own: what it costs to send a megabyte must not hold up who reads the streams.
    """
    outcome = Outcome()
    chosen = {
        name: orjson.dumps({"prompt": "x", "max_tokens": 8, **fields})
        for name, fields in bombs().items()
        if names is None or name in names
    }
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as bombers:
        bombers.submit(send_bombs, port, 0.0, {}).result()  # started, everything imported
        for _ in range(num_pairs):
            waiting = bombers.submit(time.sleep, phase_s)
            outcome.p99_without_ms.append(_itl_p99_ms(port, outcome, waiting))
            sending = bombers.submit(send_bombs, port, phase_s, chosen)
            outcome.p99_with_ms.append(_itl_p99_ms(port, outcome, sending))
            outcome.refusals += sending.result()
    return outcome


def _itl_p99_ms(port: int, outcome: Outcome, beside: Future[Any]) -> float:
    """Over all streams, from when all of them run until `beside` is done."""
    reader = _native.StreamReader(port, [stream_request(MAX_TOKENS, NUM_STREAMS, 0)] * NUM_STREAMS)
    num_events = LEAST_EVENTS
    _read(reader, num_events)
    reader.take_gaps_us()
    while not beside.done() or num_events == LEAST_EVENTS:
        num_events += LEAST_EVENTS
        _read(reader, num_events)
    outcome.num_broken_streams += reader.num_closed
    return float(np.percentile(reader.take_gaps_us(), 99)) / 1e3


def _read(reader: _native.StreamReader, num_events: int) -> None:
    if not reader.read_until(num_events, TIMEOUT_S):
        raise BenchError(f"streams hang after {reader.num_events} events")


def send_bombs(port: int, phase_s: float, chosen: Mapping[str, bytes]) -> list[Refusal]:
    """BOMBS_AT_ONCE at any time, until the time is over and each has been answered once. `chosen`: bodies by name."""
    return asyncio.run(_send_bombs(port, phase_s, chosen))


async def _send_bombs(port: int, phase_s: float, chosen: Mapping[str, bytes]) -> list[Refusal]:
    end = time.monotonic() + phase_s
    queue = list(chosen)
    refusals: list[Refusal] = []
    timeout = aiohttp.ClientTimeout(total=None)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout, headers=headers) as session:

        async def send() -> None:
            while chosen and (queue or time.monotonic() < end):
                if not queue:
                    queue.extend(chosen)
                name = queue.pop(0)
                started = time.monotonic()
                async with session.post("/v1/completions", data=chosen[name]) as response:
                    message = (await response.json())["error"]["message"] if response.status >= 400 else ""
                refusals.append(Refusal(name, response.status, time.monotonic() - started, message))

        await asyncio.gather(*(send() for _ in range(BOMBS_AT_ONCE)))
    return refusals
