"""One run: streams from one server, its CPU time between two events that every stream has reached."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokring.bench import _native
from tokring.bench.frontend.servers import (
    BenchError,
    Server,
    cpu_ns,
    get_request,
    start_floor,
    start_rival,
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


FULL = (Load(1, 2000, 2.0), Load(64, 400, 10.0), Load(512, 120, 80.0))
QUICK = (Load(1, 600, 2.0), Load(64, 150, 10.0), Load(512, 60, 80.0))


@dataclass(slots=True)
class Series:
    """Runs of one contender: CPU microseconds per token (or per request)."""

    contender: str
    variant: str
    num_streams: int
    cpu_us: list[float] = field(default_factory=list)

    @property
    def row(self) -> dict[str, Any]:
        """In the columns that `tokring bench compare` reads."""
        return {
            "direction": "front end",
            "transport": self.contender,
            "regime": self.variant,
            "batch": self.num_streams,
            "logprobs": 0,
            "p50_us": self.median,
            "p50_us_range": [min(self.cpu_us), max(self.cpu_us)],
            "runs": len(self.cpu_us),
        }

    @property
    def median(self) -> float:
        return statistics.median(self.cpu_us)


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


def measure_requests(server: Server, path: str, count: int) -> float:
    """CPU microseconds per GET on one kept connection."""
    request = get_request(path)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(RUN_TIMEOUT_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _get(client, request)
        before = cpu_ns(server.pid)
        for _ in range(count):
            _get(client, request)
        return (cpu_ns(server.pid) - before) / 1e3 / count


def _get(client: socket.socket, request: bytes) -> None:
    client.sendall(request)
    data = client.recv(65536)
    head, found, body = data.partition(b"\r\n\r\n")
    if not found or b" 200 " not in head[:20]:
        raise BenchError(f"unexpected answer: {head[:100]!r}")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    missing = length - len(body)
    while missing > 0:
        missing -= len(client.recv(missing))


def run_all(loads: Sequence[Load], repetitions: int, on_run: Callable[[], None]) -> Iterator[Series]:
    """Every load, its contenders interleaved; then the probes."""
    with start_rival("fastapi") as fastapi, start_rival("aiohttp") as aiohttp:
        for load in loads:
            with start_tokring(load.step_ms, load.num_streams) as tokring:
                yield from _run_load(load, tokring, (fastapi, aiohttp), repetitions, on_run)
                if load is loads[-1]:
                    yield from _run_probes(tokring, aiohttp, repetitions, on_run)


def num_runs(loads: Sequence[Load], repetitions: int) -> int:
    return repetitions * (len(loads) * 5 + 1)


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
            found.cpu_us.append(cpu_us)
            on_run()
    yield from series.values()


def _contenders(rivals: Sequence[Server]) -> list[tuple[str, str]]:
    return [("tokring", "plain"), ("send", "plain"), ("tokring", "stops"), *((rival.name, "plain") for rival in rivals)]


def _run_probes(tokring: Server, aiohttp: Server, repetitions: int, on_run: Callable[[], None]) -> Iterator[Series]:
    probes = ((tokring, "/health", 1000), (aiohttp, "/empty", 1000), (tokring, "/metrics", 50))
    series = {path: Series(server.name, f"GET {path}", 1) for server, path, _ in probes}
    for _ in range(repetitions):
        for server, path, count in probes:
            series[path].cpu_us.append(measure_requests(server, path, count))
        on_run()
    yield from series.values()
