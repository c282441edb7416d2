"""The command `tokring bench quality`."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokring.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

WINDOW = 256
QUICK_WINDOWS = 1
TABLE_WIDTH = 110
PEERS_PROGRAM = Path("build/peers/llama.cpp/build/bin/llama-perplexity")  # where benchmarks/peers puts it
COLUMNS = (
    ("KL mean", "kl_mean", "{:.6f}"),
    ("±", "kl_error", "{:.6f}"),
    ("median", "kl_median", "{:.6f}"),
    ("p99", "kl_p99", "{:.5f}"),
    ("max", "kl_max", "{:.4f}"),
    ("same top-1", "top1_agreement", "{:.2%}"),
    ("perplexity", "perplexity", "{:.3f}"),
)


def add_quality_command(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`tokring bench quality` below `tokring bench`."""
    quality = kinds.add_parser(
        "quality",
        help="what quantized weights and caches cost in quality: KL divergence from float32 logits",
        description="Reads a fixed text with every way to run the model on the CPU and compares the distributions of "
        "the next token with those of --dtype float32: once as a prompt, once token by token as if it was being "
        "generated. llama.cpp on the same file and reference beside it, where llama-perplexity is found.",
    )
    quality.add_argument("model", nargs="?", metavar="MODEL", help="GGUF file or directory (default: embedded)")
    quality.add_argument("--text", type=Path, metavar="FILE", help="another text than the one that comes along")
    quality.add_argument("--window", type=int, default=WINDOW, metavar="N", help=f"tokens read at once ({WINDOW})")
    quality.add_argument("--quick", action="store_true", help="one window only")
    quality.add_argument("--llama-perplexity", type=Path, metavar="PROGRAM", help="default: the peers'")
    quality.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows here")
    quality.set_defaults(run=_quality)


def _quality(arguments: argparse.Namespace) -> int:
    # What measures is imported here: `tokring serve` must not load it.
    from rich.console import Console

    from tokring.bench.machine import describe_host
    from tokring.bench.quality.forced import Windows
    from tokring.bench.quality.run import judge_all, known_variants
    from tokring.bench.quality.text import TEXT
    from tokring.checkpoint import CheckpointError, open_checkpoint

    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    try:
        checkpoint = open_checkpoint(arguments.model)
        text = TEXT if arguments.text is None else arguments.text.read_text()
        token_ids = checkpoint.load_tokenizer().encode(text, add_special_tokens=False).ids
        if arguments.quick:
            token_ids = token_ids[: QUICK_WINDOWS * arguments.window]
        windows = Windows(token_ids, arguments.window, checkpoint.bos_id if checkpoint.add_bos else None)
    except (CheckpointError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    program = arguments.llama_perplexity or find_llama_perplexity()
    with console.status("float32") as status:
        rows, skipped = judge_all(arguments.model, checkpoint, windows, known_variants(), program, status.update)
    print_rows(console, rows)
    for name, why in skipped.items():
        console.print(f"without {name}: {why}")
    if arguments.json:
        outcome = {"machine": describe_host(), "model": checkpoint.name, "rows": rows, "skipped": skipped}
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return 0


def find_llama_perplexity() -> Path | None:
    if PEERS_PROGRAM.is_file():
        return PEERS_PROGRAM
    found = shutil.which("llama-perplexity")
    return None if found is None else Path(found)


def print_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=f"Against float32 logits, {rows[0]['positions']} positions, nats", title_justify="left")
    table.add_column("weights and options")
    table.add_column("read as")
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row["who"], row["as"], *(form.format(row[name]) for _, name, form in COLUMNS))
    console.print(table)
