"""`tokring top`: shows what a running server does, without its taking part."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import msgspec

from tokring.top.diagnosis import Diagnosis, diagnose
from tokring.top.report import Report, measure
from tokring.top.running_server import RunningServer, ServerNotFound
from tokring.top.snapshot import Snapshot

EXIT_NOT_FOUND = 1
WIDTH_OF_FILES = 120  # characters, where there is no terminal to ask


def add_top_command(commands: Any) -> None:
    """Adds the subcommand to argparse's subparsers."""
    top = commands.add_parser(
        "top",
        help="show what a running server does and what limits it",
        description="Attaches read-only to the stats pages of a server on this machine: rings, processes, steps, "
        "queue, and one line that says which stage limits now.",
    )
    top.add_argument("--pid", type=int, help="a process of the server, if several servers run here")
    top.add_argument("--once", action="store_true", help="show one interval, then end")
    top.add_argument("--json", action="store_true", help="one JSON object for each interval instead of a table")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between readings (default: 1)")
    top.set_defaults(run=run_top)


def run_top(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if no server is found."""
    if not 0.05 <= arguments.interval <= 3600:
        print("tokring: error: --interval must be between 0.05 and 3600 seconds", file=sys.stderr)
        return 2
    try:
        with RunningServer.find(arguments.pid) as server:
            show = _show_json if arguments.json else _show_tables
            show(server, arguments.interval, arguments.once)
    except ServerNotFound as error:
        print(f"tokring: error: {error}", file=sys.stderr)
        return EXIT_NOT_FOUND
    return 0


def _show_json(server: RunningServer, interval_s: float, once: bool) -> None:
    for report, diagnosis in _readings(server, interval_s, once):
        print(to_json(server.supervisor_pid, report, diagnosis), flush=True)


def to_json(supervisor_pid: int, report: Report, diagnosis: Diagnosis) -> str:
    values = {"pid": supervisor_pid, "diagnosis": diagnosis, **msgspec.to_builtins(report)}
    return msgspec.json.encode(values).decode()


def _show_tables(server: RunningServer, interval_s: float, once: bool) -> None:
    from rich.console import Console  # here: it takes a while to load
    from rich.live import Live

    from tokring.top.table import render

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OF_FILES)
    if once or not console.is_terminal:
        for report, diagnosis in _readings(server, interval_s, once):
            console.print(render(server.supervisor_pid, report, diagnosis))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for report, diagnosis in _readings(server, interval_s, once):
            live.update(render(server.supervisor_pid, report, diagnosis), refresh=True)


def _readings(server: RunningServer, interval_s: float, once: bool) -> Any:
    """Yields (report, diagnosis) each interval until the server ends."""
    before: Snapshot = server.snapshot()
    while True:
        time.sleep(interval_s)
        if not server.is_running:
            raise ServerNotFound(f"the server (pid {server.supervisor_pid}) has ended")
        after = server.snapshot()
        yield measure(before, after), diagnose(before, after)
        if once:
            return
        before = after
