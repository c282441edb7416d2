"""`tokring reload`: replaces the front ends of a running server, without ending a request."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

from tokring.top.running_server import RunningServer, ServerNotFound

POLL_S = 0.05


def add_reload_command(commands: Any) -> None:
    """Adds the subcommand to argparse's subparsers."""
    command = commands.add_parser(
        "reload",
        help="replace the front ends of a running server: new code, certificates and keys; no request fails",
        description="Has a server on this machine start new front ends on the same listening sockets, and waits until "
        "they serve. The old ones end with their last connection; engine and KV cache stay.",
    )
    command.add_argument("--pid", type=int, help="a process of the server, if several servers run here")
    command.set_defaults(run=run_reload)


def run_reload(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if there is no such server, or its new front ends do not start (the old ones stay)."""
    try:
        with RunningServer.find(arguments.pid) as server:
            return _reload(server)
    except ServerNotFound as error:
        print(f"tokring: error: {error}", file=sys.stderr)
        return 1


def _reload(server: RunningServer) -> int:
    before = server.snapshot().counters
    os.kill(server.supervisor_pid, signal.SIGUSR2)
    while server.is_running:
        now = server.snapshot().counters
        if now["reloads"] > before["reloads"]:
            return 0
        if now["reloads_failed"] > before["reloads_failed"]:
            print("tokring: error: no new front ends have started, the old ones go on: see the log", file=sys.stderr)
            return 1
        time.sleep(POLL_S)
    print("tokring: error: the server has ended", file=sys.stderr)
    return 1
