"""Kills, stops, disconnects, slow readers, a full disk and garbage under mixed load, with an oracle: `make chaos`.

python -m tests.chaos --seconds 600 --report chaos.json        exit code 0: no stream failed, nothing leaked
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.chaos.adversary import Adversary, LogDisk
from tests.chaos.catalogue import catalogue
from tests.chaos.chaos_server import (
    ChaosServer,
    add_common_options,
    conclude,
    end_of,
    errors_in,
    leaks,
    log_disk,
    say,
    server_arguments,
    wait_for,
)
from tests.chaos.load import Load
from tests.chaos.server_watch import ServerWatch


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of disturbance, or longer until all kills are made"
    )
    add_common_options(parser, streams=64, tokens=120)
    parser.add_argument("--engine-kills", type=int, default=None, help="default: one every 5 seconds")
    parser.add_argument("--front-end-kills", type=int, default=None, help="default: one every 10 seconds")
    return parser.parse_args()


async def disturb(options: argparse.Namespace, server: ChaosServer, watch: ServerWatch, load: Load) -> Adversary:
    """Load and mischief side by side, until the time is over and every kill has been made."""
    loop = asyncio.get_running_loop()
    adversary = Adversary(watch, server.address, options.seed)
    adversary.last_token_time = lambda: load.last_token_time
    end, no_more = loop.time() + options.seconds, asyncio.Event()
    pause_s = max(options.seconds / 100, 1.5)
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
    return conclude(report, faults(report), options.report)


def recovery(seconds: Sequence[float]) -> dict[str, float]:
    """Engine killed to the next token at a client, over all kills."""
    if not seconds:
        return {}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"count": len(seconds), "p50_s": round(p50, 3), "p99_s": round(p99, 3), "max_s": round(max(seconds), 3)}


def faults(report: dict[str, Any]) -> list[str]:
    return [
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


def main() -> int:
    options = parse_arguments()
    options.engine_kills = int(options.seconds / 5) if options.engine_kills is None else options.engine_kills
    options.front_end_kills = int(options.seconds / 10) if options.front_end_kills is None else options.front_end_kills
    with log_disk() as disk:
        return asyncio.run(run(options, disk))


if __name__ == "__main__":
    sys.exit(main())
