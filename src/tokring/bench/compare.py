"""compare: what changed between two runs of `tokring bench ipc --json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

IDENTITY = ("direction", "transport", "delivery", "waiting", "regime", "batch", "prompt_ids", "logprobs")
NOTABLE = 1.1  # a row is shown if its median moved by more than this factor and the ranges don't overlap


class CompareError(Exception):
    """A file is not the JSON of a benchmark run."""


def load(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CompareError(f"{path}: {error}") from None
    if not isinstance(found, dict) or not {"machine", "rows", "ratios"} <= found.keys():
        raise CompareError(f"{path}: not written by `tokring bench ipc --json`: machine, rows and ratios are needed")
    return found


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in IDENTITY)


def moved_rows(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of equal rows whose p50 moved notably: apart by more than a tenth, ranges not overlapping."""
    earlier = {identity(row): row for row in before["rows"]}
    pairs = [(earlier[identity(row)], row) for row in after["rows"] if identity(row) in earlier]
    return [(old, new) for old, new in pairs if _apart(old, new)]


def _apart(old: dict[str, Any], new: dict[str, Any]) -> bool:
    low, high = sorted((old["p50_us"], new["p50_us"]))
    if high <= low * NOTABLE:
        return False
    (old_min, old_max), (new_min, new_max) = old["p50_us_range"], new["p50_us_range"]
    return bool(old_max < new_min or new_max < old_min)


def print_comparison(console: Console, before: dict[str, Any], after: dict[str, Any]) -> None:
    _print_ratios(console, before, after)
    moved = moved_rows(before, after)
    table = Table(title="p50 that moved by more than a tenth, ranges apart", title_justify="left")
    for heading in ("row", "before µs", "after µs", "factor"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    for old, new in moved:
        name = ", ".join(str(part) for part in identity(new) if part is not None)
        table.add_row(name, f"{old['p50_us']:,.2f}", f"{new['p50_us']:,.2f}", f"{new['p50_us'] / old['p50_us']:.2f}")
    console.print(table if moved else "No row's p50 moved by more than a tenth beyond its range.")


def _print_ratios(console: Console, before: dict[str, Any], after: dict[str, Any]) -> None:
    table = Table(title="ratios", title_justify="left")
    for heading in ("ratio", "before", "after", "factor"):
        table.add_column(heading, justify="left" if heading == "ratio" else "right")
    for name, new in after["ratios"].items():
        old = before["ratios"].get(name)
        factor = f"{new / old:.2f}" if old and new is not None else ""
        table.add_row(name, *("" if value is None else f"{value:,.2f}" for value in (old, new)), factor)
    console.print(table)
