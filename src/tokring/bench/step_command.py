"""The command `tokring bench step`."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

TARGETS_US = {256: 100.0, 1024: 300.0}  # of a step with one join and one leave, by running requests
TARGET_GROWTH_US = 0.3  # per added request
TARGET_VS_VLLM = 15.0


def add_step_command(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`tokring bench step` below `tokring bench`."""
    step = kinds.add_parser(
        "step",
        help="what the engine's bookkeeping adds to a step of the model",
        description="Measures µs per engine step for receive, schedule, build inputs, sample bookkeeping and publish, "
        "with a model that costs nothing, at 1 to 1,024 running requests; beside vLLM's scheduler, where vllm is "
        "installed. Wants a quiet core.",
    )
    step.add_argument("--quick", action="store_true", help="fewer steps: some seconds")
    step.add_argument("--json", type=Path, metavar="FILE", help="write machine, rows, ratios and step_us here")
    step.set_defaults(run=_step)


def _step(arguments: argparse.Namespace) -> int:
    # What measures is imported here: `tokring serve` must not load it.
    from rich.console import Console

    console = Console()
    outcome = measure_all(console, quick=arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return 0


def measure_all(console: Console, *, quick: bool) -> dict[str, Any]:
    """Run, print, and return what --json writes."""
    from tokring.bench import step_vllm
    from tokring.bench.step import BATCHES, Workload, measure

    why_not = step_vllm.why_unavailable()
    if why_not:
        console.print(f"without vLLM: {why_not}")
    rows: list[dict[str, Any]] = []
    for churn in (False, True):
        for batch in BATCHES:
            rows.append(measure(Workload(num_running=batch, churn=churn, num_steps=300 if quick else 2000)))
            if not why_not and churn:
                rows.append(step_vllm.measure(Workload(num_running=batch, churn=True, num_steps=60 if quick else 300)))
    ours = [row for row in rows if row["engine"] == "tokring" and row["load"] == "churn"]
    ratios = named_ratios(rows)
    _print(console, rows, ratios)
    return {
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load_average": round(os.getloadavg()[0], 2),
        },
        "rows": rows,
        "step_us": {str(row["batch"]): row["p50_us"] for row in ours},
        "ratios": ratios,
    }


def named_ratios(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """vs_vllm: CPU time of their step over ours at 256 running requests; None where vLLM was not measured.

    CPU time, since on a busy machine a step of milliseconds is interrupted more often than ours. growth_us_per_request:
    of the wall-clock median, from 256 to 1,024.
    """
    found = {(row["engine"], row["batch"]): row for row in rows if row["load"] == "churn"}
    ours, theirs = found["tokring", 256], found.get(("vllm", 256))
    growth = (found["tokring", 1024]["p50_us"] - ours["p50_us"]) / (1024 - 256)
    return {
        "vs_vllm": None if theirs is None else round(theirs["cpu_us"] / ours["cpu_us"], 2),
        "growth_us_per_request": round(growth, 4),
    }


def _print(console: Console, rows: list[dict[str, Any]], ratios: dict[str, float | None]) -> None:
    from rich.table import Table

    table = Table(title="µs per step, medians", title_justify="left")
    for heading in ("load", "running", "engine", "p50", "p99", "CPU", "target", "phases"):
        table.add_column(heading, justify="right" if heading in ("running", "p50", "p99", "CPU", "target") else "left")
    for row in rows:
        is_ours = row["engine"] == "tokring" and row["load"] == "churn"
        target = TARGETS_US.get(row["batch"]) if is_ours else None
        phases = ", ".join(f"{name} {us:g}" for name, us in row["phases_us"].items())
        table.add_row(
            row["load"], f"{row['batch']:,}", row["engine"], f"{row['p50_us']:,.1f}", f"{row['p99_us']:,.1f}",
            f"{row['cpu_us']:,.1f}", f"≤ {target:g}" if target else "", phases,
        )  # fmt: skip
    console.print(table)
    vs_vllm = ratios["vs_vllm"]
    console.print(f"vs_vllm: {'not measured' if vs_vllm is None else f'{vs_vllm:g}'} (target ≥ {TARGET_VS_VLLM:g})")
    console.print(f"growth: {ratios['growth_us_per_request']:g} µs per request (target ≤ {TARGET_GROWTH_US:g})")
