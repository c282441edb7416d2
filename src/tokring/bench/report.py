"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tokring.bench.ratios import Result

Row = dict[str, Any]


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """A table per direction, regime and number of logprobs; a line per transport, a column per size."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["direction"], row["regime"], row["logprobs"]), []).append(row)
    for (direction, regime, logprobs), members in groups.items():
        title = f"{direction}, {regime}" + (f", top-{logprobs} logprobs" if logprobs else "")
        console.print(_idle_table(members) if regime == "idle" else _cost_table(title, regime, members))


def _cost_table(title: str, regime: str, rows: list[Row]) -> Table:
    sizes = sorted({_size(row) for row in rows})
    figure = "us_per_step" if regime == "saturated" else "p50_us"
    what = "µs per step" if regime == "saturated" else "one-way µs p50 (p99)"
    table = Table(title=f"{title}: {what}", title_justify="left")
    for heading in ("transport", "delivers", "waits"):
        table.add_column(heading, no_wrap=True)
    for size in sizes:
        table.add_column(f"{size:,}", justify="right")
    table.add_column("CPU µs writer + reader", justify="right")
    table.add_column("syscalls", justify="right")
    for key, by_size in _by_variant(rows).items():
        last = by_size[max(by_size)]
        costs = [_cost(by_size[size], figure) if size in by_size else "" for size in sizes]
        cpu = f"{last['writer_cpu_us']:.1f} + {last['reader_cpu_us']:.1f}"
        counted = [row for row in by_size.values() if "writer_syscalls" in row]
        calls = f"{counted[0]['writer_syscalls']:.1f} + {counted[0]['reader_syscalls']:.1f}" if counted else ""
        table.add_row(*key, *costs, cpu, calls)
    return table


def _cost(row: Row, figure: str) -> str:
    text = f"{row[figure]:,.2f}" if row[figure] < 10 else f"{row[figure]:,.1f}"
    if figure == "p50_us":
        text += f" ({row['p99_us']:,.0f})"
    return text if row["valid"] else f"[dim]{text} ![/dim]"


def _idle_table(rows: list[Row]) -> Table:
    table = Table(title="idle: CPU of both processes, % of a core", title_justify="left")
    for heading in ("transport", "delivers", "waits", "%"):
        table.add_column(heading, justify="right" if heading == "%" else "left")
    for row in rows:
        table.add_row(row["transport"], row["delivery"], row["waiting"], f"{row['cpu_percent']:.3f}")
    return table


def _size(row: Row) -> int:
    return int(row["batch"] if "batch" in row else row["prompt_ids"])


def _by_variant(rows: list[Row]) -> dict[tuple[str, str, str], dict[int, Row]]:
    variants: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in rows:
        key = (row["transport"], row["delivery"], row["waiting"])
        variants.setdefault(key, {})[_size(row)] = row
    return variants


def print_ratios(console: Console, results: Sequence[Result]) -> None:
    table = Table(title="ratios of this run", title_justify="left")
    for heading in ("ratio", "value", "target", "", "of"):
        table.add_column(heading, justify="right" if heading in ("value", "target") else "left")
    for result in results:
        if result.value is not None:
            table.add_row(result.name, f"{result.value:,.2f}", _target(result), _verdict(result), result.meaning)
    console.print(table)


def _target(result: Result) -> str:
    if result.at_least is not None:
        return f"≥ {result.at_least:g}"
    return "" if result.at_most is None else f"≤ {result.at_most:g}"


def _verdict(result: Result) -> str:
    verdict = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[result.met]
    return verdict if result.valid else f"{verdict} [dim]disturbed[/dim]"
