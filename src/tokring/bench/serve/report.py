"""Table, ratios and plot of `tokring bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tokring.bench.plot import svg_lines

Row = dict[str, Any]

# name of the ratio: column, whether more is better; every ratio is > 1 where the first server is better
COMPARED = {
    "output_tokens_per_s": ("output_tokens_per_s", True),
    "ttft_p50": ("ttft_ms_p50", False),
    "itl_p99": ("itl_ms_p99", False),
    "cpu_per_token": ("cpu_us_per_token", False),
}
COLUMNS = (
    ("output tok/s", "output_tokens_per_s", "{:,.1f}"),
    ("TTFT p50", "ttft_ms_p50", "{:,.1f}"),
    ("p99 ms", "ttft_ms_p99", "{:,.1f}"),
    ("ITL p50", "itl_ms_p50", "{:,.2f}"),
    ("p99 ms", "itl_ms_p99", "{:,.2f}"),
    ("E2EL p50", "e2el_ms_p50", "{:,.0f}"),
    ("p99 ms", "e2el_ms_p99", "{:,.0f}"),
    ("goodput req/s", "goodput_requests_per_s", "{:,.2f}"),
    ("CPU µs/token", "cpu_us_per_token", "{:,.0f}"),
    ("chunks/token", "chunks_per_token", "{:.2f}"),
)


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """By "<ratio>_vs_<server>_<load>": the first server against each other one under the same load."""
    first = rows[0]["server"]
    ours = {row["load"]: row for row in rows if row["server"] == first}
    found = {}
    for row in rows:
        if row["server"] == first or row["load"] not in ours:
            continue
        for name, (column, more_is_better) in COMPARED.items():
            mine, theirs = ours[row["load"]].get(column), row.get(column)
            if mine and theirs:
                ratio = mine / theirs if more_is_better else theirs / mine
                found[f"{name}_vs_{row['server']}_{row['load']}"] = round(ratio, 3)
    return found


def print_outcome(console: Console, rows: Sequence[Row], found: dict[str, float]) -> None:
    table = Table(title="Medians of the runs, seen by the client", title_justify="left")
    table.add_column("load")
    table.add_column("server")
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [form.format(row[name]) if row.get(name) is not None else "" for _, name, form in COLUMNS]
        table.add_row(row["load"], row["server"], *cells)
    console.print(table)
    for row in rows:
        if row["failed"]:
            console.print(f"{row['server']}, {row['load']}: {row['failed']} requests failed: {row['first_error']}")
        processes = ", ".join(f"{name} {used:g}" for name, used in row["cpu_s"].items())
        if processes:
            console.print(f"CPU s a run, {row['server']}, {row['load']}: {processes}", style="dim")
    for name, ratio in found.items():
        console.print(f"{name}: {ratio:g}")


def svg(rows: Sequence[Row], title: str, subtitle: str) -> str:
    """Output tokens a second against concurrency, a line per server."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["concurrency"]:
            lines.setdefault(row["server"], []).append((row["concurrency"], row["output_tokens_per_s"]))
    return svg_lines(lines, title, subtitle, "streams at once", "tok/s")
