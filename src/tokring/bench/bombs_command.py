"""The command `tokring bench bombs`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

TARGET_RATIO = 1.5


def add_bombs_command(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`tokring bench bombs` below `tokring bench`."""
    bombs = kinds.add_parser(
        "bombs",
        help="streams beside grammars that explode in the compiler",
        description="Measures the inter-token latency of 32 streams (mock engine, 10 ms steps) with and without "
        "requests beside them whose schemas, regexes and grammars must be refused. Wants two quiet cores.",
    )
    bombs.add_argument("--quick", action="store_true", help="two pairs of short phases: about a minute")
    bombs.add_argument("--model", metavar="PATH", help="whose tokenizer is used (default: the small model's)")
    bombs.add_argument("--json", type=Path, metavar="FILE", help="write ratios and answers here")
    bombs.set_defaults(run=_bombs)


def _bombs(arguments: argparse.Namespace) -> int:
    # What measures is imported here: `tokring serve` must not load it.
    from rich.console import Console
    from rich.table import Table

    from tokring.bench.bombs import measure, start_server

    with start_server(arguments.model) as server:
        pairs, phase_s = (2, 3.0) if arguments.quick else (5, 10.0)
        summary = measure(server.port, num_pairs=pairs, phase_s=phase_s).summary()
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    table = Table(title="bombs and how they were answered", title_justify="left")
    for heading in ("bomb", "sent", "status", "slowest, s"):
        table.add_column(heading, justify="left" if heading == "bomb" else "right")
    for name, answers in summary["bombs"].items():
        table.add_row(name, str(answers["sent"]), ", ".join(map(str, answers["statuses"])), str(answers["slowest_s"]))
    console = Console()
    console.print(table)
    console.print(f"ITL p99 without, ms: {summary['itl_p99_without_ms']}; with: {summary['itl_p99_with_ms']}")
    console.print(f"ratios: {summary['ratios']}, median {summary['itl_p99_ratio']} (target ≤ {TARGET_RATIO})")
    console.print(f"streams that broke: {summary['num_broken_streams']}")
    return 0
