"""The command `tokring bench ttft`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokring.bench.first_token import Outcome

STEP_MS = 2.0
PREFILL_TOKENS_PER_S = 50_000.0
REPETITIONS = 5


def add_ttft_command(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`tokring bench ttft` below `tokring bench`."""
    ttft = kinds.add_parser(
        "ttft",
        help="first tokens of 200 short and 4 context-length prompts beside the bound that the token budget gives",
        description="Serves 200 short prompts and 4 of context length through rings, scheduler and sampling, with a "
        "model that takes 2 ms a step and 20 us a prompt token, and prints each kind's time to first token beside the "
        "latest that docs/scheduling.md derives from the token budget. In steps the result does not depend on the "
        "machine.",
    )
    ttft.add_argument("--quick", action="store_true", help="each load once, not five times")
    ttft.add_argument("--json", type=Path, metavar="FILE", help="write rows here")
    ttft.set_defaults(run=_ttft)


def _ttft(arguments: argparse.Namespace) -> int:
    # What measures is imported here: `tokring serve` must not load it.
    from rich.console import Console
    from rich.table import Table

    from tokring.bench.first_token import Load, measure

    rows: list[dict[str, Any]] = []
    for seed in range(1 if arguments.quick else REPETITIONS):
        for come in ("first", "in between"):
            load = Load(
                long_ones_come=come,
                step_ms=STEP_MS,
                prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
                seed=seed + 1,
            )
            rows += _rows(come, seed + 1, measure(load))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    table = Table(title="time to first token: steps, then ms", title_justify="left")
    for heading in ("long ones come", "prompts", "median", "latest", "its bound", "nearest to its bound"):
        table.add_column(heading, justify="left" if heading == "long ones come" else "right")
    for row in rows:
        table.add_row(
            row["long_ones_come"], f"{row['requests']} {row['kind']}",
            f"{row['median_steps']:g} / {row['median_ms']:.0f}", f"{row['latest_steps']} / {row['latest_ms']:.0f}",
            f"{row['bound_steps']} / {row['bound_ms']:.0f}", f"{row['nearest']:.0%}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    num_late, total = sum(row["late"] for row in rows), sum(row["requests"] for row in rows)
    console.print(f"later than the bound: {num_late} of {total} requests")
    return 1 if num_late else 0


def _rows(come: str, seed: int, outcome: Outcome) -> list[dict[str, Any]]:
    """One row for the short prompts and one for the long ones."""
    import numpy as np

    from tokring.bench.first_token import LONGEST_SHORT

    rows = []
    for kind in ("short", "long"):
        chosen = [r for r in outcome.requests if (r.num_prompt <= LONGEST_SHORT) == (kind == "short")]
        latest = max(chosen, key=lambda request: request.seconds)
        rows.append(
            {
                "long_ones_come": come,
                "seed": seed,
                "kind": kind,
                "requests": len(chosen),
                "median_steps": float(np.median([request.steps for request in chosen])),
                "median_ms": round(float(np.median([request.seconds for request in chosen])) * 1e3, 1),
                "latest_steps": latest.steps,
                "latest_ms": round(latest.seconds * 1e3, 1),
                "bound_steps": latest.bound_steps,
                "bound_ms": round(outcome.bound_s(latest) * 1e3, 1),
                "nearest": round(max(request.steps / request.bound_steps for request in chosen), 3),
                "late": sum(request in outcome.late for request in chosen),
            }
        )
    return rows
