"""One run: streams from one server, its CPU time between two events that every stream has reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokring.bench import _native
from tokring.bench.frontend.servers import (
    BenchError,
    Server,
    cpu_ns,
    start_floor,
    start_tokring,
    stream_request,
)

RUN_TIMEOUT_S = 300.0
OPENING = 4  # events of each stream before counting begins
SLICE = 10  # events of each stream between two looks at the clocks: the last look before any stream ends counts
RIVALS = ("fastapi", "aiohttp")


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams at once; a step every `step_ms`, slowly: a server that is behind sends several tokens at once."""

    num_streams: int
    num_tokens: int
    step_ms: float

    @property
    def step_us(self) -> int:
        return int(self.step_ms * 1000)


@dataclass(slots=True)
class Series:
    """What was measured of one contender: microseconds, of CPU per token or request, or of latency."""

    contender: str
    variant: str
    num_streams: int
    us: list[float] = field(default_factory=list)
    is_latency: bool = False

    @property
    def row(self) -> dict[str, Any]:
        """In the columns that `tokring bench compare` reads."""
        row = {
            "direction": "front end",
            "transport": self.contender,
            "regime": self.variant,
            "batch": self.num_streams,
            "logprobs": 0,
            "p50_us": self.median,
            "p50_us_range": [min(self.us), max(self.us)],
            "runs": len(self.us),
        }
        return {**row, "p99_us": self.percentile(99)} if self.is_latency else row

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    def percentile(self, percent: int) -> float:
        """Of what was measured, the smallest that `percent` of all do not exceed."""
        return sorted(self.us)[max(0, -(-len(self.us) * percent // 100) - 1)]


def measure_streams(server: Server, load: Load, *, with_stops: bool = False) -> tuple[float, float]:
    """(CPU microseconds per event, bytes per event). Raises BenchError if streams end early or hang."""
    request = stream_request(load.num_tokens, load.num_streams, load.step_us, with_stops=with_stops)
    reader = _native.StreamReader(server.port, [request] * load.num_streams)
    _read(reader, OPENING, server)
    first = last = _Reading.of(reader, server)
    for target in range(OPENING + SLICE, load.num_tokens, SLICE):
        _read(reader, target, server)
        if reader.num_closed:
            break
        last = _Reading.of(reader, server)
    _read(reader, load.num_tokens * 2, server)
    num_events = last.num_events - first.num_events
    if not num_events:
        raise BenchError(f"{server.name}: {load.num_streams} streams never ran side by side")
    return (last.cpu_ns - first.cpu_ns) / 1e3 / num_events, (last.num_bytes - first.num_bytes) / num_events


@dataclass(frozen=True, slots=True)
class _Reading:
    cpu_ns: int
    num_events: int
    num_bytes: int

    @classmethod
    def of(cls, reader: _native.StreamReader, server: Server) -> _Reading:
        return cls(cpu_ns(server.pid), reader.num_events, reader.num_bytes)


def _read(reader: _native.StreamReader, events_per_stream: int, server: Server) -> None:
    if not reader.read_until(events_per_stream, RUN_TIMEOUT_S):
        raise BenchError(f"{server.name}: streams hang after {reader.num_events} events")


def run_streams(
    loads: Sequence[Load], fastapi: Server, aiohttp: Server, repetitions: int, on_run: Callable[[], None]
) -> Iterator[Series]:
    """Every load, its contenders interleaved."""
    for load in loads:
        with start_tokring(load.step_ms, load.num_streams) as tokring:
            yield from _run_load(load, tokring, (fastapi, aiohttp), repetitions, on_run)


def num_stream_runs(loads: Sequence[Load], repetitions: int) -> int:
    return repetitions * len(loads) * 5


def _run_load(
    load: Load, tokring: Server, rivals: Sequence[Server], repetitions: int, on_run: Callable[[], None]
) -> Iterator[Series]:
    series = {key: Series(*key, load.num_streams) for key in _contenders(rivals)}
    event_bytes = 250.0
    for _ in range(repetitions):
        for (name, variant), found in series.items():
            if name == "send":
                with start_floor(load.num_streams, load.num_tokens, round(event_bytes), load.step_us) as floor:
                    cpu_us, _ = measure_streams(floor, load)
            elif name == "tokring":
                cpu_us, event_bytes = measure_streams(tokring, load, with_stops=variant == "stops")
            else:
                [server] = [rival for rival in rivals if rival.name == name]
                cpu_us, _ = measure_streams(server, load)
            found.us.append(cpu_us)
            on_run()
    yield from series.values()


def _contenders(rivals: Sequence[Server]) -> list[tuple[str, str]]:
    return [("tokring", "plain"), ("send", "plain"), ("tokring", "stops"), *((rival.name, "plain") for rival in rivals)]
