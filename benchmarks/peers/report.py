"""One table of what was measured and how often ours was better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.scenarios import METRICS, Scenario

Row = dict[str, Any]

FORMATS = {"output tok/s": "{:,.1f}", "TTFT p50": "{:,.0f} ms", "ITL p99": "{:,.1f} ms", "CPU/token": "{:,.0f} µs"}


def ratios_of(scenario: Scenario, rows: Sequence[Row]) -> list[Row]:
    """For each pair that was measured: the ratios by metric (> 1: ours is better) and the least ones asked for."""
    measured = {row["server"]: row for row in rows}
    found = []
    for pair in scenario.pairs:
        if pair.ours in measured and pair.peer in measured:
            ratios = {metric: _ratio(measured[pair.ours], measured[pair.peer], metric) for metric in METRICS}
            found.append({"ours": pair.ours, "peer": pair.peer, "ratios": ratios, "asked": dict(pair.asked)})
    return found


def _ratio(ours: Row, theirs: Row, metric: str) -> float | None:
    column, more_is_better = METRICS[metric]
    mine, other = ours.get(column), theirs.get(column)
    if not mine or not other:
        return None
    return round(float(mine / other if more_is_better else other / mine), 3)


def print_report(console: Console, scenarios: Sequence[Row]) -> None:
    table = Table(title="Medians, seen by the client; ratios > 1: the first is better", title_justify="left")
    table.add_column("scenario")
    table.add_column("server")
    for metric in METRICS:
        table.add_column(metric, justify="right")
    table.add_column("chunks/token", justify="right")
    table.add_column("asked for")
    for scenario in scenarios:
        for row in scenario["rows"]:
            table.add_row(scenario["name"], row["server"], *_measured_cells(row), "")
        for pair in scenario["ratios"]:
            name = f"{pair['ours']} : {pair['peer']}"
            cells = ["" if ratio is None else f"{ratio:.2f} ×" for ratio in pair["ratios"].values()]
            table.add_row(scenario["name"], name, *cells, "", _verdict(pair), style="bold")
        table.add_section()
    console.print(table)
    for scenario in scenarios:
        for row in scenario["rows"]:
            if row["failed"]:
                console.print(f"{scenario['name']}, {row['server']}: {row['failed']} failed: {row['first_error']}")


def _measured_cells(row: Row) -> list[str]:
    values = [(row.get(column), FORMATS[metric]) for metric, (column, _) in METRICS.items()]
    cells = ["" if value is None else form.format(value) for value, form in values]
    return [*cells, f"{row['chunks_per_token']:.2f}"]


def _verdict(pair: Row) -> str:
    """Each wanted ratio with yes or no."""
    verdicts = []
    for metric, least in pair["asked"].items():
        ratio = pair["ratios"][metric]
        verdicts.append(f"{metric} ≥ {least:g}: {'yes' if ratio is not None and ratio >= least else 'no'}")
    return ", ".join(verdicts)
