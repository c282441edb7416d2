"""Kills, stops, disconnects, slow readers, a full disk and garbage under mixed load, with an oracle: `make chaos`.

python -m tests.chaos --seconds 600 --report chaos.json        exit code 0: no stream failed, nothing leaked
"""

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

import numpy as np

from tests.chaos.adversary import Adversary, LogDisk
from tests.chaos.catalogue import catalogue
from tests.chaos.load import Load
from tests.chaos.server_watch import Holdings, ServerWatch
from tests.support.serving import START_DEADLINE_S, ServerProcess, tiny_model, wait_until

CALM_DEADLINE_S = 60.0
LOG_DISK_BYTES = 256 << 10
CLONE_NEWNS = 0x00020000
RSS_SLACK_BYTES = 48 << 20  # caches and arenas that had not been touched before


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of disturbance, or longer until all kills are made"
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--engine-kills", type=int, default=None, help="default: one every 5 seconds")
    parser.add_argument("--front-end-kills", type=int, default=None, help="default: one every 10 seconds")
    parser.add_argument("--tokens", type=int, default=120, help="output of most requests")
    parser.add_argument("--model", default="tiny", help="tiny (random weights), mock, embedded, or what `tokring serve` takes")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the mock engine")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--report", type=Path, default=None, help="file for the JSON report; it is printed anyway")
    return parser.parse_args()


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


async def disturb(options: argparse.Namespace, server: ChaosServer, watch: ServerWatch, load: Load) -> Adversary:
    """Load and mischief side by side, until the time is over and every kill has been made."""
    loop = asyncio.get_running_loop()
    adversary = Adversary(watch, server.address, options.seed)
    adversary.last_token_time = lambda: load.last_token_time
    end, no_more = loop.time() + options.seconds, asyncio.Event()
    pause_s = options.seconds / 100
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(options.streams, no_more))
        kills = [
            group.create_task(
                adversary.kill_engines(options.engine_kills, options.seconds / (options.engine_kills + 1))
            ),
            group.create_task(
                adversary.kill_front_ends(
                    options.front_end_kills, options.seconds / (options.front_end_kills + 1), options.front_ends
                )
            ),
        ]
        group.create_task(adversary.stop_processes(pause_s, min(1.0, pause_s), options.front_ends))
        group.create_task(adversary.disconnect(pause_s / 10))
        group.create_task(adversary.send_garbage(pause_s / 10))
        if server.disk.can_be_full:
            group.create_task(adversary.fill_log_disk(server.disk, pause_s * 2))
        await asyncio.gather(*kills)
        say(f"all kills are made: {dict(adversary.counts)}")
        await asyncio.sleep(max(end - loop.time(), 0.0))
        adversary.stop.set()
        no_more.set()
    return adversary


def say(what: str) -> None:
    print(time.strftime("%H:%M:%S"), what, file=sys.stderr, flush=True)


async def run(options: argparse.Namespace, disk: LogDisk) -> int:
    server = ChaosServer(server_arguments(options), disk)
    report: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}}
    try:
        await asyncio.to_thread(server.wait_ready)
        watch = ServerWatch(server)
        load = Load(server.address, catalogue(options.tokens), options.seed)
        await load.learn()
        say(f"{load.num_kinds} kinds of requests have the same answer alone and in company")
        await wait_for(watch.is_idle, "the server is idle")
        before = watch.holdings()
        started = time.monotonic()
        adversary = await disturb(options, server, watch, load)
        say("disturbance is over")
        load.explain_cut_off(adversary.killed_ports)
        report |= {
            "seconds": round(time.monotonic() - started, 1),
            "kinds_of_requests": load.num_kinds,
            "load": dict(load.counts),
            "output_tokens": load.num_output_tokens,
            "mischief": dict(adversary.counts),
            "recovery": recovery(adversary.recovery_s),
            "engine_restarts": watch.supervisor.get("engine_restarts"),
            "frontend_restarts": watch.supervisor.get("frontend_restarts"),
            "requests_resumed": watch.total("requests_resumed"),
            "failures": load.failures,
            **await leaks(watch, before),
        }
        watch.close()
        report["end"] = await end_of(server)
    finally:
        server.kill()
        report["errors_in_log"] = errors_in(server.log)
    report["verdict"] = verdict(report)
    text = json.dumps(report, indent=1)
    print(text)
    if options.report is not None:
        options.report.write_text(text + "\n")
    return 0 if report["verdict"] == "passed" else 1


def recovery(seconds: Sequence[float]) -> dict[str, float]:
    """Engine killed to the next token at a client, over all kills."""
    if not seconds:
        return {}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"count": len(seconds), "p50_s": round(p50, 3), "p99_s": round(p99, 3), "max_s": round(max(seconds), 3)}


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


def verdict(report: dict[str, Any]) -> str:
    wrong = [
        what
        for what, is_wrong in (
            ("streams failed", report["load"].get("failures", 0)),
            ("nothing was answered", not report["load"].get("right", 0)),
            ("leaks", report["leaks"]),
            ("the end was not clean", any(report["end"].values())),
            ("tracebacks in the log", report["errors_in_log"]["Traceback"]),
        )
        if is_wrong
    ]
    return "failed: " + ", ".join(wrong) if wrong else "passed"


def main() -> int:
    options = parse_arguments()
    options.engine_kills = int(options.seconds / 5) if options.engine_kills is None else options.engine_kills
    options.front_end_kills = int(options.seconds / 10) if options.front_end_kills is None else options.front_end_kills
    with log_disk() as disk:
        return asyncio.run(run(options, disk))


if __name__ == "__main__":
    sys.exit(main())
