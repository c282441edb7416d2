"""The servers that are compared: ours with the mock engine, its rivals, and the bare send(2)."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

START_TIMEOUT_S = 120.0
# Never matched by the mock engine's text, but begun now and then.
STOP_STRINGS = ["\n\n\n\n### End", "<|never|>", " the the the the", "zq stop zq"]
_READY = re.compile(r"ready after [0-9.]+ s: http://[^:]+:(\d+)")


class BenchError(Exception):
    """A server did not do what it was asked for."""


def cpu_ns(pid: int) -> int:
    """CPU time of another process, all its threads: its CPU-time clock (clock_getcpuclockid(3))."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def stream_request(num_tokens: int, num_streams: int, step_us: int, *, with_stops: bool = False) -> bytes:
    """A streamed chat completion; the rivals, whose tokens come from a timer, read the last two."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "seed": step_us,
        "user": str(num_streams),
    }
    if with_stops:
        body["stop"] = STOP_STRINGS
    data = orjson.dumps(body)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def get_request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


class Server:
    """A child process that serves on `port`; `pid` is the process whose CPU counts."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[str],
        port: int,
        pid: int,
        log_reader: threading.Thread | None = None,
    ) -> None:
        self.name = name
        self.process = process
        self.port = port
        self.pid = pid
        self._log_reader = log_reader

    def child_pid(self, title: str) -> int:
        """Of a child of `process`: "engine 0"."""
        return _child_pid(self.process.pid, title)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._log_reader is not None:
            self._log_reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()


def start_tokring(step_ms: float, num_streams: int, *more_arguments: str) -> Server:
    """Our server; its log is read on, so that its pipe never fills."""
    arguments = ["--engine", "mock", "--port", "0", "--mock-step-ms", str(step_ms), "--max-num-seqs", str(num_streams)]
    arguments += ["--max-num-batched-tokens", "65536"]  # all prompts in one step: the streams run side by side
    arguments += ["--disable-access-log-for-endpoints", "/v1/chat/completions"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tokring", "serve", *arguments, *more_arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        found = _READY.search(line)
        if found:
            reader = threading.Thread(target=process.stderr.read, daemon=True)
            reader.start()
            return Server("tokring", process, int(found[1]), _child_pid(process.pid, "frontend 0"), reader)
    raise BenchError("tokring did not start:\n" + "".join(lines[-10:]))


def _child_pid(parent: int, title: str) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat, command = (path / "stat").read_text(), (path / "cmdline").read_bytes()
        except OSError:
            continue
        if command.rstrip(b"\0 ").decode(errors="replace") == f"tokring: {title}":
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                return int(path.name)
    raise BenchError(f"the supervisor {parent} has no process {title}")


def start_rival(kind: str) -> Server:
    """`kind`: fastapi or aiohttp; see rival.py."""
    with _listener() as listening:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokring.bench.frontend.rival", kind, str(listening.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            text=True,
        )
        port = listening.getsockname()[1]
    server = Server(kind, process, port, process.pid)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"the rival {kind} did not start")
        time.sleep(0.05)
    return server


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as client:
            client.settimeout(1)
            client.sendall(get_request("/empty"))
            return client.recv(100).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def start_floor(num_streams: int, num_steps: int, event_bytes: int, step_us: int) -> Server:
    """One send(2) of `event_bytes` per stream and step, once."""
    numbers = [str(number) for number in (num_streams, num_steps, event_bytes, step_us)]
    with _listener() as listening:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokring.bench.frontend.send_floor", str(listening.fileno()), *numbers],
            stdin=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            text=True,
        )
        return Server("send", process, listening.getsockname()[1], process.pid)


@contextmanager
def _listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        yield listening
