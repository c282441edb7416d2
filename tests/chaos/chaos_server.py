"""The server under attack or under load for hours: its start, its log on a tiny disk, what it holds, its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.adversary import LogDisk
from tests.chaos.server_watch import Holdings, ServerWatch
from tests.support.serving import START_DEADLINE_S, ServerProcess, tiny_model, wait_until

CALM_DEADLINE_S = 60.0
LOG_DISK_BYTES = 256 << 10
CLONE_NEWNS = 0x00020000
RSS_SLACK_BYTES = 48 << 20  # caches and arenas that had not been touched before


def add_common_options(parser: argparse.ArgumentParser, *, streams: int, tokens: int) -> None:
    """Options of the server and its load, with defaults."""
    parser.add_argument("--streams", type=int, default=streams)
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=tokens, help="output of most requests")
    parser.add_argument(
        "--model", default="tiny", help="tiny (random weights), mock, embedded, or what `tokring serve` takes"
    )
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the mock engine")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--report", type=Path, default=None, help="file for the JSON report; it is printed anyway")


def conclude(report: dict[str, Any], wrong: Sequence[str], path: Path | None) -> int:
    """Print and write the report with its verdict; returns the exit code."""
    report["verdict"] = "failed: " + ", ".join(wrong) if wrong else "passed"
    text = json.dumps(report, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n")
    return 1 if wrong else 0


def server_arguments(options: argparse.Namespace) -> list[str]:
    arguments = ["--port", "0", "--api-server-count", str(options.front_ends)]
    if options.model == "mock":
        return [*arguments, "--engine", "mock", "--mock-step-ms", str(options.step_ms), "--model", tiny_model()]
    if options.model == "tiny":
        return [*arguments, "--dtype", "float32", "--model", tiny_model()]
    return [*arguments, *([] if options.model == "embedded" else ["--model", options.model])]


@contextlib.contextmanager
def log_disk() -> Iterator[LogDisk]:
    """A tiny file system of its own for the log; a directory, never full, where mounting is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory(prefix="tokring-chaos-") as directory:
        has_own_mounts = libc.unshare(CLONE_NEWNS) == 0
        mount = ["mount", "-t", "tmpfs", "-o", f"size={LOG_DISK_BYTES}", "tmpfs", directory]
        is_mounted = has_own_mounts and subprocess.run(mount, capture_output=True).returncode == 0
        try:
            yield LogDisk(Path(directory), can_be_full=is_mounted)
        finally:
            if is_mounted:
                subprocess.run(["umount", "-l", directory], check=False)


class ChaosServer(ServerProcess):
    """A server that logs to a disk which may be full."""

    def __init__(self, arguments: Sequence[str], disk: LogDisk) -> None:
        self.disk = disk
        with open(disk.path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tokring", "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self.pid = self.process.pid

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def log(self) -> str:
        return self.disk.text()

    def wait_ready(self) -> str:
        wait_until(lambda: self.url or self.process.poll() is not None, "the server is ready", START_DEADLINE_S)
        if not self.url:
            raise RuntimeError(f"the server ended with code {self.process.returncode}:\n{self.log}")
        wait_until(lambda: self.health() == 200, "/health answers 200", START_DEADLINE_S)
        return self.url

    def wait_end(self, deadline_s: float = CALM_DEADLINE_S) -> int:
        return self.process.wait(deadline_s)


async def leaks(watch: ServerWatch, before: dict[str, Holdings]) -> dict[str, Any]:
    """What is held more than before, once everything has calmed down."""
    try:
        await wait_for(watch.is_idle, "nothing runs, nothing waits, no KV block is used")
        await wait_for(lambda: not grown(before, watch.holdings()), "what was opened is closed")
    except TimeoutError:
        pass
    gauges = {
        name: watch.engine.get(name) for name in ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
    }
    after = watch.holdings()
    return {
        "gauges": gauges,
        "leaks": grown(before, after) + [f"{name} is {value}" for name, value in gauges.items() if value],
        "before": {name: asdict(held) for name, held in before.items()},
        "after": {name: asdict(held) for name, held in after.items()},
    }


def grown(before: dict[str, Holdings], after: dict[str, Holdings]) -> list[str]:
    found = [f"processes: {sorted(after)}, before: {sorted(before)}"] if set(after) != set(before) else []
    for name in set(after) & set(before):
        for what, slack in (("descriptors", 0), ("segments", 0), ("zombies", 0), ("rss_bytes", RSS_SLACK_BYTES)):
            now, then = getattr(after[name], what), getattr(before[name], what)
            if now > then + slack:
                found.append(f"{name}: {what} {then} -> {now}")
    return found


async def end_of(server: ChaosServer) -> dict[str, Any]:
    """SIGTERM: exit code 0, no process and no page left."""
    children = server.children()
    server.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(server.wait_end)
    gone = lambda: not any(child.is_running() for child in children.values())  # noqa: E731
    with contextlib.suppress(TimeoutError):
        await wait_for(gone, "the children are gone")
    return {"exit_code": code, "pages_left": len(server.pages()), "children_left": 0 if gone() else len(children)}


async def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + CALM_DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {CALM_DEADLINE_S:g} s: {what}")
        await asyncio.sleep(0.1)


def errors_in(log: str) -> dict[str, int]:
    """Kinds of ERROR lines (numbers left out) and tracebacks, counted."""
    lines = [re.sub(r"\d+", "#", line.split(" ERROR ", 1)[1]) for line in log.split("\n") if " ERROR " in line]
    return dict(Counter(lines).most_common(20)) | {"Traceback": log.count("Traceback (most recent call last)")}


def say(what: str) -> None:
    print(time.strftime("%H:%M:%S"), what, file=sys.stderr, flush=True)
