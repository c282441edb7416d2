"""The command `tokring bench replay`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def add_replay_command(kinds: Any) -> None:
    """`tokring bench replay` below `tokring bench`."""
    replay = kinds.add_parser(
        "replay",
        help="the steps of a recording through the rings",
        description="Plays the steps of a recording (tokring serve --record) through an OUT ring, process to process.",
    )
    replay.add_argument("recording", type=Path, metavar="FILE")
    replay.add_argument("--speed", choices=("original", "full"), default="full", help="pace (default: full)")
    replay.add_argument("--json", action="store_true", help="print one JSON object")
    replay.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    # What measures is imported here: `tokring serve` must not load it.
    from tokring.bench.replay import play, recorded_steps
    from tokring.recording.file_format import RecordingError

    try:
        steps = recorded_steps(arguments.recording)
    except RecordingError as error:
        print(f"tokring: error: {error}", file=sys.stderr)
        return 1
    played = play(steps, is_full_speed=arguments.speed == "full")
    if arguments.json:
        print(json.dumps(asdict(played)))
    else:
        for name, value in asdict(played).items():
            print(f"{name:22} {value:,.1f}" if isinstance(value, float) else f"{name:22} {value:,}")
    return 0
