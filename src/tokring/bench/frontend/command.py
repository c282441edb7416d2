"""The command `tokring bench frontend`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from tokring.bench.frontend.runs import Series
    from tokring.bench.frontend.sizes import Sizes
    from tokring.bench.ratios import Result

PARTS = ("streams", "logprobs", "probes", "slow-clients")


def add_frontend_command(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    frontend = kinds.add_parser(
        "frontend",
        help="CPU of the server process per token, beside other ways to build one",
        description="Measures what a token costs the server process between the engine and a client's socket (mock "
        "engine), beside a bare send(2), FastAPI with pydantic, and aiohttp with a queue per stream, in the same run; "
        "what probes cost; and what clients that never read cost those that do.",
    )
    frontend.add_argument("--quick", action="store_true", help="shorter runs: about four minutes")
    frontend.add_argument("--json", type=Path, metavar="FILE", help="write machine, rows and ratios here")
    frontend.add_argument("--repetitions", type=int, metavar="N", help="runs per row (default: 5, quick 3)")
    frontend.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these (default: all)")
    frontend.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tokring.bench.frontend.servers import BenchError
    from tokring.bench.frontend.sizes import FULL, QUICK
    from tokring.config import ConfigError

    sizes = QUICK if arguments.quick else FULL
    if arguments.repetitions:
        sizes = dataclasses.replace(sizes, repetitions=arguments.repetitions)
    try:
        outcome = measure(Console(), sizes, arguments.parts)
    except BenchError as error:
        raise ConfigError(str(error)) from None
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return 0


def measure(console: Console, sizes: Sizes, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Runs, prints, and returns what --json writes."""
    from rich.progress import Progress

    from tokring.bench.command import default_cores
    from tokring.bench.machine import describe_machine
    from tokring.bench.pair import Setup
    from tokring.bench.report import print_ratios

    machine = describe_machine(Setup(default_cores(), False))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=sum(_num_runs(part, sizes) for part in parts))
        series, results = _measure_parts(sizes, parts, lambda: progress.advance(task))
    _print_series(console, series)
    print_ratios(console, results)
    return {
        "machine": machine,
        "rows": [found.row for found in series],
        "ratios": {result.name: result.value for result in results},
    }


def _num_runs(part: str, sizes: Sizes) -> int:
    return {
        "streams": len(sizes.loads) * 5 * sizes.repetitions,
        "logprobs": 1,
        "probes": 4 * sizes.repetitions,
        "slow-clients": sizes.num_pairs,
    }[part]


def _measure_parts(sizes: Sizes, parts: Sequence[str], on_run: Callable[[], None]) -> tuple[list[Series], list[Result]]:
    from tokring.bench.frontend import figures
    from tokring.bench.frontend.logprob_rendering import run_logprobs
    from tokring.bench.frontend.probes import run_busy_probes, run_probes
    from tokring.bench.frontend.runs import run_streams
    from tokring.bench.frontend.servers import start_rival, start_tokring
    from tokring.bench.frontend.slow_clients import run_slow_clients

    series: list[Series] = []
    results: list[Result] = []
    repetitions = sizes.repetitions
    if "streams" in parts:
        with start_rival("fastapi") as fastapi, start_rival("aiohttp") as aiohttp:
            series += run_streams(sizes.loads, fastapi, aiohttp, repetitions, on_run)
        results += figures.stream_ratios(series)
    if "logprobs" in parts:
        series += run_logprobs(repetitions, 20 * repetitions)
        on_run()
        results += figures.logprob_ratios(series)
    if "probes" in parts:
        with start_rival("aiohttp") as aiohttp, start_tokring(5.0, 64) as tokring:
            series += run_probes(tokring, aiohttp, repetitions, sizes.num_probes, on_run)
        series += run_busy_probes(repetitions, sizes.num_probes // 5, on_run)
        results += figures.probe_ratios(series)
    if "slow-clients" in parts:
        outcome = run_slow_clients(sizes.num_pairs, sizes.itl_tokens, on_run)
        series += outcome.series
        results += figures.slow_client_ratios(outcome)
    return series, results


def _print_series(console: Console, series: Sequence[Series]) -> None:
    from rich.table import Table

    table = Table(title="µs: CPU of the server process per token or request, or latency", title_justify="left")
    for heading in ("server", "what", "streams", "median", "p99", "range"):
        table.add_column(heading, justify="left" if heading in ("server", "what") else "right")
    for found in series:
        span = f"{min(found.us):,.2f} – {max(found.us):,.2f}"
        p99 = f"{found.percentile(99):,.0f}" if found.is_latency else ""
        table.add_row(found.contender, found.variant, str(found.num_streams), f"{found.median:,.2f}", p99, span)
    console.print(table)
