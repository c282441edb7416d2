"""The command `tokring bench frontend`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from tokring.bench.frontend.runs import Series
    from tokring.bench.ratios import Result


def add_frontend_command(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    frontend = kinds.add_parser(
        "frontend",
        help="CPU of the server process per token, beside other ways to build one",
        description="Measures what a token costs the server process between the engine and a client's socket (mock "
        "engine), beside a bare send(2), FastAPI with pydantic, and aiohttp with a queue per stream, in the same run.",
    )
    frontend.add_argument("--quick", action="store_true", help="shorter runs: about a minute and a half")
    frontend.add_argument("--json", type=Path, metavar="FILE", help="write machine, rows and ratios here")
    frontend.add_argument("--repetitions", type=int, metavar="N", help="runs per row (default: 5, quick 3)")
    frontend.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tokring.bench.frontend.runs import FULL, QUICK
    from tokring.bench.frontend.servers import BenchError
    from tokring.config import ConfigError

    loads = QUICK if arguments.quick else FULL
    repetitions = arguments.repetitions or (3 if arguments.quick else 5)
    try:
        outcome = measure(Console(), loads, repetitions)
    except BenchError as error:
        raise ConfigError(str(error)) from None
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return 0


def measure(console: Console, loads: Sequence[Any], repetitions: int) -> dict[str, Any]:
    """Runs, prints, and returns what --json writes."""
    from rich.progress import Progress

    from tokring.bench.command import default_cores
    from tokring.bench.frontend.logprob_rendering import run_logprobs
    from tokring.bench.frontend.runs import num_runs, run_all
    from tokring.bench.machine import describe_machine
    from tokring.bench.pair import Setup
    from tokring.bench.report import print_ratios

    machine = describe_machine(Setup(default_cores(), False))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=num_runs(loads, repetitions))
        series = list(run_all(loads, repetitions, lambda: progress.advance(task)))
    series += run_logprobs(repetitions, 20 * repetitions)
    _print_series(console, series)
    results = ratios_of(series)
    print_ratios(console, results)
    return {
        "machine": machine,
        "rows": [found.row for found in series],
        "ratios": {result.name: result.value for result in results},
    }


def ratios_of(series: Sequence[Series]) -> list[Result]:
    """By the names under which they are published; stream ratios at the largest number of streams."""
    from tokring.bench.ratios import Result

    costs = {(found.contender, found.variant): found.median for found in sorted(series, key=lambda s: s.num_streams)}
    ours = costs["tokring", "plain"]
    most = max(found.num_streams for found in series if found.variant == "plain")
    at = f"CPU of the server process per token, {most} streams"

    def ratio(name: str, over: float, under: float, meaning: str, **targets: float) -> Result:
        return Result(name, over / under, True, meaning, targets.get("at_least"), targets.get("at_most"))

    return [
        ratio("vs_send_floor", ours, costs["send", "plain"], f"{at}: ours / send(2) alone", at_most=1.6),
        ratio("vs_fastapi", costs["fastapi", "plain"], ours, f"{at}: FastAPI + pydantic / ours", at_least=7),
        ratio("vs_aiohttp", costs["aiohttp", "plain"], ours, f"{at}: aiohttp + queue / ours"),
        ratio("stops_overhead", costs["tokring", "stops"], ours, f"{at}: with 4 stop strings / without", at_most=1.1),
        ratio(
            "logprobs_vs_pydantic",
            costs["pydantic", "logprobs"],
            costs["tokring", "logprobs"],
            "columns to bytes, top-20 logprobs, per token: pydantic / ours",
            at_least=20,
        ),
        ratio(
            "health_vs_aiohttp",
            costs["tokring", "GET /health"],
            costs["aiohttp", "GET /empty"],
            "CPU per request: /health / an empty aiohttp handler",
            at_most=1.5,
        ),
        ratio(
            "metrics_ms", costs["tokring", "GET /metrics"], 1000, "CPU milliseconds per scrape of /metrics", at_most=1
        ),
    ]


def _print_series(console: Console, series: Sequence[Series]) -> None:
    from rich.table import Table

    table = Table(title="CPU µs of the server process per token or request", title_justify="left")
    for heading in ("server", "what", "streams", "median", "range"):
        table.add_column(heading, justify="left" if heading in ("server", "what") else "right")
    for found in series:
        span = f"{min(found.cpu_us):.2f} – {max(found.cpu_us):.2f}"
        table.add_row(found.contender, found.variant, str(found.num_streams), f"{found.median:.2f}", span)
    console.print(table)
