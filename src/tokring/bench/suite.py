"""run_suite: all items of a plan, interleaved repetition by repetition, and a row for each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tokring.bench.case import CLOSED, HOT, Direction
from tokring.bench.pair import Run, Setup, count_syscalls, run_pair
from tokring.bench.payload import Payload, make_payload
from tokring.bench.plan import Item
from tokring.bench.usage import MILLISECONDS_PER_TICK

MAX_FOREIGN_SHARE = 0.05  # of the two cores' time; a row that is above it beyond doubt is marked invalid
COUNTED_STEPS = 20  # of the run under ptrace
COUNTED_BATCH = 256

Row = dict[str, Any]


def run_suite(
    items: list[Item], repetitions: int, setup: Setup, progress: Callable[[Item], None] = lambda item: None
) -> list[Row]:
    """A-B-C-A-B-C: what drifts, drifts for all."""
    payloads: dict[Any, Payload] = {item.case: make_payload(item.case) for item in items}
    runs: dict[Item, list[Run]] = {item: [] for item in items}
    for _ in range(repetitions):
        for item in items:
            transport = item.variant.build(payloads[item.case])
            runs[item].append(run_pair(transport, item.regime, item.num_steps, setup))
            progress(item)
    return [
        make_row(item, payloads[item.case], runs[item]) | _syscalls(item, payloads[item.case], setup) for item in items
    ]


def make_row(item: Item, payload: Payload, runs: list[Run]) -> Row:
    """Medians over repetitions, and their range."""
    transport = item.variant.build(payload)
    num_bytes = transport.num_bytes()
    transport.close()
    foreign, doubt = foreign_share(runs)
    size = "batch" if item.case.direction == Direction.STEP else "prompt_ids"
    return {
        "direction": str(item.case.direction),
        "transport": item.variant.transport.label,
        "delivery": str(item.variant.delivery),
        "waiting": str(item.variant.waiting),
        "regime": item.regime.name,
        size: item.case.size,
        "logprobs": item.case.num_logprobs,
        "bytes": num_bytes,
        "steps": item.num_steps,
        "repetitions": len(runs),
        **_spread("p50_us", (np.percentile(run.one_way_ns, 50) / 1e3 for run in runs)),
        **_spread("p99_us", (np.percentile(run.one_way_ns, 99) / 1e3 for run in runs)),
        **_spread("p999_us", (np.percentile(run.one_way_ns, 99.9) / 1e3 for run in runs)),
        **_spread("us_per_step", (run.wall_ns / 1e3 / item.num_steps for run in runs)),
        **_spread("writer_cpu_us", (run.writer["cpu_ns"] / 1e3 / item.num_steps for run in runs)),
        **_spread("reader_cpu_us", (run.reader["cpu_ns"] / 1e3 / item.num_steps for run in runs)),
        **_per_step(item, runs),
        "foreign_share": round(foreign, 4),
        "foreign_share_doubt": round(doubt, 4),
        "valid": foreign - doubt <= MAX_FOREIGN_SHARE,
    }


def foreign_share(runs: list[Run]) -> tuple[float, float]:
    """What others took of the two cores while these runs went on, and by how much that may be wrong.

    The kernel tells in ticks how long a core was busy. The difference of two readings is off by less than a tick, as
    often up as down (standard deviation tick / sqrt(6)), so the runs are added up before anything is judged; the doubt
    is twice the standard deviation of the sum.
    """
    core_ms = sum(run.core_ms for run in runs)
    doubt_ms = 2 * MILLISECONDS_PER_TICK * math.sqrt(2 * len(runs) / 6)
    return max(0.0, sum(run.foreign_ms for run in runs)) / core_ms, doubt_ms / core_ms


def _spread(name: str, values: Iterable[float]) -> Row:
    found = [round(float(value), 3) for value in values]
    return {name: statistics.median(found), f"{name}_range": [min(found), max(found)]}


def _per_step(item: Item, runs: list[Run]) -> Row:
    def median(side: str, name: str) -> float:
        return round(float(statistics.median(getattr(run, side)[name] for run in runs)) / item.num_steps, 3)

    row = {f"{side}_context_switches": median(side, "voluntary_switches") for side in ("writer", "reader")}
    for name in ("doorbells_sent", "doorbells_suppressed"):
        if name in runs[0].writer:
            row[name] = median("writer", name)
    if item.regime.name == "idle":
        used_ns = [run.writer["cpu_ns"] + run.reader["cpu_ns"] for run in runs]
        row["cpu_percent"] = round(100 * statistics.median(used_ns) / item.regime.sleep_ns, 3)
    return row


def _syscalls(item: Item, payload: Payload, setup: Setup) -> Row:
    """Counted where the benchmark's own loop makes no calls that would count: hot and closed."""
    if item.regime not in (HOT, CLOSED) or item.case.size != COUNTED_BATCH or item.case.num_logprobs:
        return {}
    counted = count_syscalls(item.variant.build(payload), item.regime, COUNTED_STEPS, setup)
    if counted is None:
        return {}
    return {"writer_syscalls": counted[0], "reader_syscalls": counted[1]}
