"""Hours of mixed load: resident memory, descriptors and segments must not grow, counters must balance: `make soak`.

python -m tests.chaos.soak --seconds 7200 --report soak.json        exit code 0: flat, balanced, every answer right
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.chaos.adversary import Adversary
from tests.chaos.catalogue import catalogue
from tests.chaos.chaos_server import (
    ChaosServer,
    add_common_options,
    conclude,
    end_of,
    errors_in,
    log_disk,
    say,
    server_arguments,
    wait_for,
)
from tests.chaos.load import Load
from tests.chaos.server_watch import Holdings, ServerWatch

WARM_UP_SHARE = 0.25  # of the time: caches fill; growth is looked for after it
# So small that it is full when the warm-up is over: memory of KV blocks is the kernel's until they are first written.
KV_CACHE_BYTES = {"tiny": 4 << 20, "embedded": 192 << 20}
FLAT_BYTES = 4 << 20  # growth over the whole time that counts as none, whatever the noise
WHAT = ("rss_bytes", "descriptors", "segments")
Sample = tuple[float, dict[str, Holdings]]  # seconds since the start


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=7200.0)
    add_common_options(parser, streams=16, tokens=80)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a client rests before its next request")
    return parser.parse_args()


async def run(options: argparse.Namespace) -> int:
    with log_disk() as disk:
        kv_cache = (
            ("--kv-cache-memory-bytes", str(KV_CACHE_BYTES[options.model])) if options.model in KV_CACHE_BYTES else ()
        )
        server = ChaosServer((*server_arguments(options), *kv_cache), disk)
        report: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}}
        try:
            await asyncio.to_thread(server.wait_ready)
            watch = ServerWatch(server)
            load = Load(server.address, catalogue(options.tokens), options.seed, pause_s=options.pause)
            await load.learn()
            await wait_for(watch.is_idle, "the server is idle")
            say(f"{load.num_kinds} kinds of requests for {options.seconds:g} s")
            samples, mischief = await load_and_sample(options, server, watch, load)
            load.explain_cut_off([])
            await wait_for(watch.is_idle, "the server is idle again")
            report |= {
                "seconds": round(samples[-1][0], 1),
                "load": dict(load.counts),
                "output_tokens": load.num_output_tokens,
                "mischief": mischief,
                "growth": growth(samples),
                "balance": await balance(watch),
                "failures": load.failures,
                "engine_restarts": watch.supervisor.get("engine_restarts"),
                "frontend_restarts": watch.supervisor.get("frontend_restarts"),
            }
            watch.close()
            report["end"] = await end_of(server)
        finally:
            server.kill()
            report["errors_in_log"] = errors_in(server.log)
    return conclude(report, faults(report), options.report)


async def load_and_sample(
    options: argparse.Namespace, server: ChaosServer, watch: ServerWatch, load: Load
) -> tuple[list[Sample], dict[str, int]]:
    """Mixed load with clients that go and send nonsense; what every process holds, a few hundred times."""
    adversary = Adversary(watch, server.address, options.seed)
    no_more = asyncio.Event()
    samples: list[Sample] = []
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(options.streams, no_more))
        group.create_task(adversary.disconnect(1.0))
        group.create_task(adversary.send_garbage(1.0))
        while (now_s := time.monotonic() - started) < options.seconds:
            samples.append((now_s, watch.holdings()))
            server.disk.empty()
            await asyncio.sleep(min(options.seconds / 300, 10.0))
        adversary.stop.set()
        no_more.set()
    return samples, dict(adversary.counts)


def growth(samples: Sequence[Sample]) -> dict[str, dict[str, dict[str, float | bool]]]:
    """By process and quantity: the fitted growth over the time after the warm-up, and the noise around the fit."""
    times = np.array([time_s for time_s, _ in samples])
    late = times >= times[-1] * WARM_UP_SHARE
    found: dict[str, dict[str, dict[str, float | bool]]] = {}
    for name in samples[-1][1]:
        if all(name in held for _, held in samples):
            columns = {what: np.array([getattr(held[name], what) for _, held in samples], float) for what in WHAT}
            found[name] = {what: _trend(times[late], values[late], what) for what, values in columns.items()}
    return found


def _trend(times: np.ndarray[Any, Any], values: np.ndarray[Any, Any], what: str) -> dict[str, float | bool]:
    slope, start = np.polyfit(times, values, 1)
    noise = float(np.std(values - (slope * times + start)))
    grown = float(slope * (times[-1] - times[0]))
    slack = max(3 * noise, FLAT_BYTES if what == "rss_bytes" else 1.0)
    return {
        "first": float(values[0]),
        "last": float(values[-1]),
        "growth": round(grown, 3),
        "per_hour": round(float(slope) * 3600, 3),
        "noise": round(noise, 3),
        "is_flat": bool(grown <= slack),
    }


async def balance(watch: ServerWatch) -> dict[str, int]:
    """Every request that the engine took in has ended; nothing is open. What differs from 0 is a fault."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_blocks_used", "open_streams", "open_connections")

    def left() -> dict[str, int]:
        ended = sum(watch.total(f"request_success_{reason}") for reason in ("stop", "length", "abort", "error"))
        return {name: watch.total(name) for name in gauges} | {
            "requests without an end": watch.total("num_requests_intake") - ended
        }

    try:
        await wait_for(lambda: not any(left().values()), "everything balances")
    except TimeoutError:
        pass
    return left()


def faults(report: dict[str, Any]) -> list[str]:
    grown = [
        f"{name}: {what} grew by {trend['growth']:g}"
        for name, trends in report["growth"].items()
        for what, trend in trends.items()
        if not trend["is_flat"]
    ]
    unbalanced = [f"{name}: {value}" for name, value in report["balance"].items() if value]
    wrong = grown + unbalanced + [name for name, value in report["end"].items() if value]
    if report["failures"] or not report["load"].get("right", 0):
        wrong.append("answers were wrong")
    if report["engine_restarts"] or report["frontend_restarts"] or report["errors_in_log"]["Traceback"]:
        wrong.append("something died")
    return wrong


if __name__ == "__main__":
    sys.exit(asyncio.run(run(parse_arguments())))
