"""The commands below `tokring bench`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokring.bench.bombs_command import add_bombs_command
from tokring.bench.first_token_command import add_ttft_command
from tokring.bench.frontend.command import add_frontend_command
from tokring.bench.quality.command import add_quality_command
from tokring.bench.replay_command import add_replay_command
from tokring.bench.serve.command import add_serve_command
from tokring.bench.step_command import add_step_command

if TYPE_CHECKING:
    from rich.console import Console


def add_bench_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`tokring bench ...` below the program's commands."""
    bench = commands.add_parser("bench", help="measure the boundary between front end and engine")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    ipc = kinds.add_parser(
        "ipc",
        help="cost of one engine step to one front end, the rings beside other transports",
        description="Measures what one engine step costs on its way to one front end, with no model: the rings, and "
        "other transports in the same run, interleaved. Wants two quiet cores.",
    )
    ipc.add_argument("--quick", action="store_true", help="batch 1 and 256, hot and closed: under a minute")
    ipc.add_argument("--json", type=Path, metavar="FILE", help="write machine, rows and ratios here")
    ipc.add_argument("--plot", type=Path, metavar="FILE.svg", help="write cost against batch size as SVG here")
    ipc.add_argument(
        "--cores", type=_two_cores, metavar="A,B", help="cores of writer and reader (default: two allowed)"
    )
    ipc.add_argument("--repetitions", type=int, metavar="N", help="runs per row (default: 5, quick 3)")
    ipc.add_argument("--realtime", action="store_true", help="run at SCHED_RR 10 (needs privileges): less interference")
    ipc.set_defaults(run=_ipc)
    add_frontend_command(kinds)
    add_step_command(kinds)
    add_serve_command(kinds)
    add_quality_command(kinds)
    add_replay_command(kinds)
    add_bombs_command(kinds)
    add_ttft_command(kinds)
    compare = kinds.add_parser("compare", help="what changed between two runs")
    compare.add_argument("before", type=Path, metavar="A.json")
    compare.add_argument("after", type=Path, metavar="B.json")
    compare.set_defaults(run=_compare)


def _two_cores(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    try:
        cores = int(first), int(second)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not two core numbers like 0,1") from None
    if not set(cores) <= os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"this process may use the cores {sorted(os.sched_getaffinity(0))}")
    return cores


def default_cores() -> tuple[int, int]:
    """The last two allowed cores: the first one handles most interrupts. One core alone serves both sides, badly."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[-2 % len(allowed)], allowed[-1]


def _ipc(arguments: argparse.Namespace) -> int:
    # What measures is imported here: `tokring serve` must not load it.
    from rich.console import Console

    from tokring.bench.pair import Setup
    from tokring.bench.plan import FULL, QUICK, make_plan

    console = Console()
    setup = Setup(arguments.cores or default_cores(), arguments.realtime)
    extent = QUICK if arguments.quick else FULL
    items, missing = make_plan(extent)
    for name, why in missing.items():
        console.print(f"without {name}: {why}")
    outcome = measure(console, items, arguments.repetitions or extent.repetitions, setup)
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    if arguments.plot:
        from tokring.bench.plot import svg_plot

        arguments.plot.write_text(svg_plot(outcome["rows"], outcome["machine"]))
    return 0


def measure(console: Console, items: list[Any], repetitions: int, setup: Any) -> dict[str, Any]:
    """Runs, prints, and returns what --json writes."""
    from rich.progress import Progress

    from tokring.bench.machine import describe_machine
    from tokring.bench.ratios import further_ratios, named_ratios
    from tokring.bench.report import print_ratios, print_rows
    from tokring.bench.suite import MAX_FOREIGN_SHARE, run_suite

    machine = describe_machine(setup)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(items) * repetitions)
        rows = run_suite(items, repetitions, setup, lambda item: progress.advance(task))
    named, further = named_ratios(rows), further_ratios(rows)
    print_rows(console, rows)
    print_ratios(console, [*named, *further])
    disturbed = sum(not row["valid"] for row in rows)
    if disturbed:
        share = f"{MAX_FOREIGN_SHARE:.0%}"
        console.print(
            f"{disturbed} of {len(rows)} rows are marked: others took more than {share} of the two cores, beyond doubt."
        )
    return {
        "machine": machine,
        "rows": rows,
        "ratios": {result.name: result.value for result in named},
        "further_ratios": {result.name: result.value for result in further},
        "disturbed_ratios": [result.name for result in (*named, *further) if not result.valid],
    }


def _compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tokring.bench.compare import CompareError, load, print_comparison
    from tokring.config import ConfigError

    try:
        before, after = load(arguments.before), load(arguments.after)
    except CompareError as error:
        raise ConfigError(str(error)) from None
    print_comparison(Console(), before, after)
    return 0
