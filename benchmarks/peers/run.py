"""`python -m benchmarks.peers.run`: tokring beside vLLM and llama.cpp, as one client sees them.

All servers of a scenario run at once; `tokring bench serve` loads them in turn with the same requests while SIGSTOP
holds the others. This process confines itself to two cores before it starts any server: servers and client inherit
them. The client runs at real-time priority where that is allowed, so that a busy server can't make it read late;
servers don't.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers import servers
from benchmarks.peers.places import PeerError
from benchmarks.peers.report import print_report, ratios_of
from benchmarks.peers.scenarios import SCENARIOS, Scenario, with_fast
from benchmarks.peers.servers import Fleet, Launch, Server
from benchmarks.peers.weights import tiny_directory
from tokring.bench.command import default_cores
from tokring.bench.serve.command import add_serve_command, measure_all
from tokring.bench.serve.target import TargetError
from tokring.checkpoint import CheckpointError
from tokring.options import all_fields

REALTIME_PRIORITY = 10
QUICK_OUTPUT_LEN = 32
TABLE_WIDTH = 140


def main() -> int:
    arguments = _parser().parse_args()
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    cores = sorted(set(arguments.cores or default_cores()))
    os.sched_setaffinity(0, cores)
    chosen = [scenario for scenario in SCENARIOS if scenario.name in (arguments.scenarios or _names())]
    if has_fast_option() and not arguments.no_fast:
        chosen = [with_fast(scenario) for scenario in chosen]
    bench = Bench(console, arguments.without, quick=arguments.quick, repetitions=arguments.repetitions)
    with Fleet() as fleet:
        measured = [found for scenario in chosen if (found := bench.measure(scenario, fleet)) is not None]
    for name, why in bench.skipped.items():
        console.print(f"without {name}: {why}")
    print_report(console, measured)
    if arguments.json:
        outcome = {"cores": cores, "quick": arguments.quick, "scenarios": measured, "skipped": bench.skipped}
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    has_failed = any(row["failed"] for found in measured for row in found["rows"])
    return 1 if has_failed or not measured else 0


def has_fast_option() -> bool:
    return any(item.name == "cpu_fast" for item, _ in all_fields())


class Bench:
    """Measures one scenario after the other; notes which servers or scenarios were left out, and why."""

    def __init__(self, console: Console, without: Sequence[str], *, quick: bool, repetitions: int) -> None:
        self.skipped: dict[str, str] = {}
        self._console = console
        self._without = set(without)
        self._quick = quick
        self._repetitions = 1 if quick else repetitions

    def measure(self, scenario: Scenario, fleet: Fleet) -> dict[str, Any] | None:
        """Rows and ratios as --json writes them; None if it could not be measured."""
        running = self._start(scenario, fleet)
        if not running:
            return None
        self._console.print(f"{scenario.name}: {scenario.about}", style="dim")
        try:
            with realtime():
                outcome = self._bench_serve(scenario, [f"{server.launch.name}={server.url}" for server in running])
        except TargetError as error:
            self.skipped[scenario.name] = str(error)
            return None
        return {
            "name": scenario.name,
            "about": scenario.about,
            "commands": {server.launch.name: list(server.launch.command) for server in running},
            "ratios": ratios_of(scenario, outcome["rows"]),
            **outcome,
        }

    def _start(self, scenario: Scenario, fleet: Fleet) -> list[Server]:
        """Starts what can be started of the scenario's servers. Those of other scenarios are stopped first."""
        wanted = []
        for name in scenario.servers:
            try:
                if name not in self._without and name not in self.skipped:
                    wanted.append(_launch(scenario, name))
            except (PeerError, CheckpointError) as error:
                self.skipped[name] = str(error)
        fleet.keep(wanted)
        started = []
        for launch in wanted:
            try:
                started.append(fleet.ensure(launch))
            except PeerError as error:
                self.skipped[launch.name] = str(error)
        return started

    def _bench_serve(self, scenario: Scenario, urls: Sequence[str]) -> dict[str, Any]:
        rounds = 1 if self._quick else scenario.rounds
        output_len = QUICK_OUTPUT_LEN if self._quick else scenario.output_len
        words = [
            "serve", *urls,
            "--concurrency", str(scenario.streams), "--num-prompts", str(scenario.streams * rounds),
            "--input-len", str(scenario.input_len), "--output-len", str(output_len),
            "--repetitions", str(self._repetitions),
        ]  # fmt: skip
        if scenario.prefix_len:
            words += ["--workload", "shared-prefix", "--prefix-len", str(scenario.prefix_len)]
        if scenario.is_tiny:
            words += ["--tokenizer", str(tiny_directory())]
        parser = argparse.ArgumentParser()
        add_serve_command(parser.add_subparsers())
        return measure_all(parser.parse_args(words), self._console)


def _launch(scenario: Scenario, name: str) -> Launch:
    if scenario.is_tiny:
        return servers.tiny(name)
    return servers.embedded(name, scenario.streams, scenario.tokens_per_slot)


@contextmanager
def realtime() -> Iterator[None]:
    """This process at real-time priority, where it may have it."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(REALTIME_PRIORITY))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.run",
        description=(__doc__ or "").strip(),
        epilog="scenarios:\n" + "\n".join(f"  {scenario.name:14} {scenario.about}" for scenario in SCENARIOS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = _names()
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", type=_one_of(names), help="default: all, see below")
    parser.add_argument(
        "--quick", action="store_true", help="one run each, one short answer a stream: shows that it works"
    )
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="alternations (default: 3)")
    parser.add_argument(
        "--without", action="append", default=[], metavar="SERVER", help="leave it out; may be repeated"
    )
    parser.add_argument("--no-fast", action="store_true", help="leave tokring --cpu-fast out")
    parser.add_argument(
        "--cores", type=_cores, metavar="A,B", help="of servers and client (default: two that are allowed)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, commands, rows and ratios here")
    return parser


def _names() -> list[str]:
    return [scenario.name for scenario in SCENARIOS]


class _one_of:  # noqa: N801  argparse shows its name
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, text: str) -> str:
        if text not in self._names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(self._names)}")
        return text


def _cores(text: str) -> tuple[int, ...]:
    cores = tuple(int(core) for core in text.split(","))
    if not set(cores) <= os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"this process may use the cores {sorted(os.sched_getaffinity(0))}")
    return cores


if __name__ == "__main__":
    sys.exit(main())
