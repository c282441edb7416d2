"""What /health and /metrics cost and how soon they answer: server idle, engine stopped, front end at full speed."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokring.bench import _native
from tokring.bench.frontend.runs import RUN_TIMEOUT_S, Series
from tokring.bench.frontend.servers import BenchError, Server, cpu_ns, get_request, start_tokring, stream_request

BUSY_STREAMS = 256
BUSY_TOKENS = 4000  # of each stream; begun again if they end too soon
PROBE_GAP_S = 0.01
SCRAPES_PER_S = 20
SCRAPED_S = 2.0
READ_SLICE = 20  # events of each stream between two looks whether to stop


class Prober:
    """One kept connection that asks for one path."""

    def __init__(self, server: Server, path: str, status: int = 200) -> None:
        self.server = server
        self._request = get_request(path)
        self._status = f" {status} ".encode()
        self._client = socket.create_connection(("127.0.0.1", server.port))
        self._client.settimeout(RUN_TIMEOUT_S)
        self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self) -> float:
        """Microseconds until the whole answer was there. Raises BenchError for any other status."""
        begin = time.perf_counter_ns()
        self._client.sendall(self._request)
        data = self._client.recv(65536)
        head, found, body = data.partition(b"\r\n\r\n")
        if not found or self._status not in head[:20]:
            raise BenchError(f"unexpected answer: {head[:100]!r}")
        missing = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) - len(body)
        while missing > 0:
            missing -= len(self._client.recv(missing))
        return (time.perf_counter_ns() - begin) / 1e3

    def cpu_us(self, count: int) -> float:
        """CPU of the server process per request, in microseconds; requests one behind the other."""
        self.ask()
        before = cpu_ns(self.server.pid)
        for _ in range(count):
            self.ask()
        return (cpu_ns(self.server.pid) - before) / 1e3 / count


def run_probes(
    tokring: Server, aiohttp: Server, repetitions: int, num_asked: int, on_run: Callable[[], None]
) -> Iterator[Series]:
    """CPU per request beside an empty handler's, in turns: idle, then with the engine stopped; then 20 Hz scrapes."""
    yield from _costs(tokring, aiohttp, "", 200, repetitions, num_asked, on_run)
    with stopped_engine(tokring):
        yield from _costs(tokring, aiohttp, ", engine stopped", 503, repetitions, num_asked, on_run)
    scraped = Series("tokring", f"GET /metrics, {SCRAPES_PER_S} a second", 0)
    for _ in range(repetitions):
        scraped.us.append(_scrape_cost_us(tokring))
        on_run()
    yield scraped


def _costs(
    tokring: Server,
    aiohttp: Server,
    when: str,
    health_status: int,
    repetitions: int,
    num_asked: int,
    on_run: Callable[[], None],
) -> Iterator[Series]:
    with (
        Prober(tokring, "/health", health_status) as health,
        Prober(aiohttp, "/empty") as empty,
        Prober(tokring, "/metrics") as metrics,
    ):
        asked = (
            (Series("tokring", f"GET /health{when}", 0), health, num_asked),
            (Series("aiohttp", f"GET /empty{when}", 0), empty, num_asked),
            (Series("tokring", f"GET /metrics{when}", 0), metrics, num_asked // 10),
        )
        for _ in range(repetitions):
            for series, prober, count in asked:
                series.us.append(prober.cpu_us(count))
            on_run()
    for series, _, _ in asked:
        yield series


@contextmanager
def stopped_engine(server: Server) -> Iterator[None]:
    """The engine hangs meanwhile, and /health knows it."""
    pid = server.child_pid("engine 0")
    os.kill(pid, signal.SIGSTOP)
    try:
        _wait_for_health(server, 503)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        _wait_for_health(server, 200)


def _wait_for_health(server: Server, status: int) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    with Prober(server, "/health", status) as prober:
        while time.monotonic() < deadline:
            try:
                prober.ask()
                return
            except BenchError:
                time.sleep(0.1)
    raise BenchError(f"/health did not become {status}")


def _scrape_cost_us(server: Server) -> float:
    """CPU microseconds per scrape at its pace, above what as long a time without scrapes takes."""
    before = cpu_ns(server.pid)
    time.sleep(SCRAPED_S)
    idle_ns = cpu_ns(server.pid) - before
    count = int(SCRAPED_S * SCRAPES_PER_S)
    with Prober(server, "/metrics") as prober:
        prober.ask()
        before, due = cpu_ns(server.pid), time.monotonic()
        for _ in range(count):
            prober.ask()
            due += 1 / SCRAPES_PER_S
            time.sleep(max(0.0, due - time.monotonic()))
        return (cpu_ns(server.pid) - before - idle_ns) / 1e3 / count


def run_busy_probes(repetitions: int, num_asked: int, on_run: Callable[[], None]) -> Iterator[Series]:
    """Microseconds until /health and /metrics have answered beside streams as fast as they go; every single one."""
    series = [
        Series("tokring", f"GET {path}, latency", BUSY_STREAMS, is_latency=True) for path in ("/health", "/metrics")
    ]
    with start_tokring(0.0, BUSY_STREAMS) as server, streams_at_full_speed(server):
        with Prober(server, "/health") as health, Prober(server, "/metrics") as metrics:
            for _ in range(repetitions):
                for _ in range(num_asked):
                    series[0].us.append(health.ask())
                    series[1].us.append(metrics.ask())
                    time.sleep(PROBE_GAP_S)
                on_run()
    yield from series


@contextmanager
def streams_at_full_speed(server: Server) -> Iterator[None]:
    """BUSY_STREAMS streams, read by a thread, from when all have begun."""
    stop, begun = threading.Event(), threading.Event()
    requests = [stream_request(BUSY_TOKENS, BUSY_STREAMS, 0)] * BUSY_STREAMS

    def read() -> None:
        while not stop.is_set():
            reader = _native.StreamReader(server.port, requests)
            target = 0
            while not stop.is_set() and reader.num_closed < BUSY_STREAMS:
                target += READ_SLICE
                reader.read_until(target, RUN_TIMEOUT_S)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        if not begun.wait(RUN_TIMEOUT_S):
            raise BenchError("the streams never ran side by side")
        yield
    finally:
        stop.set()
        thread.join()
