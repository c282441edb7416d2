"""Clients that never read beside clients that do: what the readers notice, what it costs in memory, what remains."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson

from tokring.bench import _native
from tokring.bench.frontend.runs import RUN_TIMEOUT_S, Series
from tokring.bench.frontend.servers import BenchError, Server, get_request, start_tokring, stream_request
from tokring.bench.usage import PAGE_BYTES
from tokring.top.running_server import RunningServer
from tokring_ipc import read_sums

NUM_CLIENTS = 64  # of each kind
STEP_MS = 5.0
DEAF_TOKENS = 6000  # more than any run takes
RECEIVE_BUFFER_BYTES = 4096
LONG_NAME = "m" * 1000  # in every event: what the kernel takes for a client that does not read is full within seconds


@dataclass(slots=True)
class SlowClientsOutcome:
    """Of all runs. p99 in microseconds, of the gaps between two tokens as the readers see them."""

    alone_p99_us: list[float] = field(default_factory=list)
    beside_p99_us: list[float] = field(default_factory=list)
    extra_mib: float = 0.0  # of the front end's memory, at most, with the deaf clients
    freed_s: float = 0.0  # at most, until nothing was running after they had left

    @property
    def itl_ratio(self) -> float:
        """Median over the pairs of neighbouring runs."""
        return float(np.median(np.divide(self.beside_p99_us, self.alone_p99_us)))

    @property
    def series(self) -> list[Series]:
        return [
            Series("tokring", "token gap p99, readers alone", NUM_CLIENTS, self.alone_p99_us),
            Series("tokring", "token gap p99, beside as many deaf clients", NUM_CLIENTS, self.beside_p99_us),
        ]


def run_slow_clients(num_pairs: int, num_tokens: int, on_run: Callable[[], None]) -> SlowClientsOutcome:
    """`num_pairs` pairs of runs, with and without deaf clients, the order changing from pair to pair."""
    outcome = SlowClientsOutcome()
    with start_tokring(STEP_MS, 2 * NUM_CLIENTS, "--served-model-name", LONG_NAME) as server:
        _gap_p99_us(server, num_tokens)  # warm
        for pair in range(num_pairs):
            for is_beside in (False, True) if pair % 2 == 0 else (True, False):
                if is_beside:
                    _beside(server, num_tokens, outcome)
                else:
                    outcome.alone_p99_us.append(_gap_p99_us(server, num_tokens))
            on_run()
    return outcome


def _beside(server: Server, num_tokens: int, outcome: SlowClientsOutcome) -> None:
    before = _resident_mib(server.pid)
    with deaf_clients(server):
        outcome.beside_p99_us.append(_gap_p99_us(server, num_tokens))
        outcome.extra_mib = max(outcome.extra_mib, _resident_mib(server.pid) - before)
    left = time.monotonic()
    _wait_until(lambda: not _num_running(server), "the slots of clients that have left are not freed")
    outcome.freed_s = max(outcome.freed_s, time.monotonic() - left)


@contextmanager
def deaf_clients(server: Server) -> Iterator[None]:
    """NUM_CLIENTS streams whose clients read nothing, from when the server can send none of them any more."""
    clients = []
    with RunningServer.find(server.pid) as pages:
        try:
            for _ in range(NUM_CLIENTS):
                client = socket.socket()
                clients.append(client)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
                client.connect(("127.0.0.1", server.port))
                client.sendall(stream_request(DEAF_TOKENS, NUM_CLIENTS, 0))
            _wait_until(lambda: _num_running(server) >= NUM_CLIENTS, "the clients that never read are not served")
            _wait_until(
                lambda: read_sums(pages.pages)["stalled_connections"] >= _num_running(server),
                "clients that never read are sent to without end",
            )
            yield
        finally:
            for client in clients:
                client.close()


def _wait_until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(complaint)
        time.sleep(0.01)


def _gap_p99_us(server: Server, num_tokens: int) -> float:
    requests = [stream_request(num_tokens, NUM_CLIENTS, 0)] * NUM_CLIENTS
    reader = _native.StreamReader(server.port, requests)
    if not reader.read_until(2 * num_tokens, RUN_TIMEOUT_S):
        raise BenchError(f"readers hang after {reader.num_events} events")
    return float(np.percentile(reader.take_gaps_us(), 99))


def _num_running(server: Server) -> int:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(get_request("/load"))
        return int(orjson.loads(client.recv(65536).partition(b"\r\n\r\n")[2])["server_load"])


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 2**20
