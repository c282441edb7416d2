"""The command `tokring bench serve`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokring.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tokring.bench.serve.run import Goal, Load
    from tokring.bench.serve.target import Target
    from tokring.bench.serve.workload import Workload

DEFAULT_URL = "http://127.0.0.1:8000"
WARM_UP_SEED = 1 << 20
TABLE_WIDTH = 150


def add_serve_command(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`tokring bench serve` below `tokring bench`."""
    serve = kinds.add_parser(
        "serve",
        help="load on running OpenAI servers: TTFT, ITL, throughput, goodput, CPU per token",
        description="Streams requests from one or several running OpenAI-compatible servers and reports what the "
        "client sees. Several servers are measured in alternation with the same requests, the others held still by "
        "SIGSTOP meanwhile (where they run on this machine, unless --no-hold). Ratios compare the first with each.",
    )
    serve.add_argument("servers", nargs="*", metavar="[NAME=]URL[#MODEL]", help=f"servers (default: {DEFAULT_URL})")
    serve.add_argument("--model", default=None, help="model name in requests (default: what /v1/models lists first)")
    serve.add_argument("--api-key", default=None, help="sent as a bearer token")
    serve.add_argument("--api", choices=("chat", "completions"), default="completions", help="default: completions")
    serve.add_argument("--workload", choices=("random", "shared-prefix", "sharegpt"), default="random")
    serve.add_argument("--dataset", type=Path, metavar="FILE", help="conversations in ShareGPT's JSON form")
    serve.add_argument("--tokenizer", metavar="MODEL", help="model whose tokenizer counts prompts (default: embedded)")
    serve.add_argument("--input-len", type=_positive, default=128, metavar="N", help="tokens a prompt (default: 128)")
    serve.add_argument("--output-len", type=_positive, default=128, metavar="N", help="tokens an answer (default: 128)")
    serve.add_argument("--prefix-len", type=_positive, default=1024, metavar="N", help="shared tokens (shared-prefix)")
    serve.add_argument("--num-prompts", type=_positive, metavar="N", help="requests a run (default: 4 × concurrency)")
    serve.add_argument(
        "--concurrency", type=_positive_list, default=None, metavar="N[,N...]",
        help="closed loop: streams at once, one run each (default: 1,8,32 without --request-rate)",
    )  # fmt: skip
    serve.add_argument(
        "--request-rate", type=float, metavar="R", help="open loop: Poisson arrivals a second, bounded by --concurrency"
    )
    serve.add_argument("--repetitions", type=_positive, default=3, metavar="N", help="runs of each (default: 3)")
    serve.add_argument("--goodput", metavar="ttft:MS,itl:MS,e2el:MS", help="what a request must keep to count")
    serve.add_argument("--no-ignore-eos", action="store_true", help="let the model end its answers")
    serve.add_argument("--no-hold", action="store_true", help="do not stop the other servers while one is measured")
    serve.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one run (default: 600)")
    serve.add_argument("--seed", type=int, default=0)
    serve.add_argument("--json", type=Path, metavar="FILE", help="write machine, rows and ratios here")
    serve.add_argument("--plot", type=Path, metavar="FILE.svg", help="output tokens/s against concurrency as SVG")
    serve.set_defaults(run=_serve)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _positive_list(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _serve(arguments: argparse.Namespace) -> int:
    # What measures is imported here: `tokring serve` must not load it.
    from rich.console import Console

    from tokring.bench.serve.report import print_outcome, ratios, svg
    from tokring.bench.serve.target import TargetError
    from tokring.bench.serve.workload import WorkloadError

    console = Console()
    console.width = max(console.width, TABLE_WIDTH)  # a file or a narrow terminal must not lose columns
    try:
        outcome = measure_all(arguments, console)
    except (TargetError, WorkloadError) as error:
        raise ConfigError(str(error)) from None
    outcome["ratios"] = ratios(outcome["rows"])
    print_outcome(console, outcome["rows"], outcome["ratios"])
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    if arguments.plot:
        machine = outcome["machine"]
        arguments.plot.write_text(
            svg(outcome["rows"], "Output tokens a second", f"{machine['cpu']}, {machine['date'][:10]}")
        )
    return 1 if any(row["failed"] for row in outcome["rows"]) else 0


def measure_all(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run everything; what --json writes, without the ratios."""
    from contextlib import nullcontext

    from rich.progress import Progress

    from tokring.bench.machine import describe_host
    from tokring.bench.serve.run import Load, measure, merged
    from tokring.bench.serve.target import held
    from tokring.bench.serve.workload import Workload, due_times
    from tokring.checkpoint import open_checkpoint

    targets = _targets(arguments)
    goal = _goal(arguments)
    tokenizer = open_checkpoint(arguments.tokenizer).load_tokenizer()
    concurrencies: list[int] = arguments.concurrency or ([0] if arguments.request_rate else [1, 8, 32])
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    loads: dict[str, tuple[Load, Workload]] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(concurrencies) * arguments.repetitions * len(targets))
        for concurrency in concurrencies:
            load = Load(
                concurrency=concurrency,
                rate=arguments.request_rate,
                ignore_eos=not arguments.no_ignore_eos,
                api=arguments.api,
                timeout_s=arguments.timeout,
            )
            num_prompts = arguments.num_prompts or 4 * (concurrency or 32)
            for repetition in range(-1, arguments.repetitions):  # the first one warms up
                workload = Workload(
                    kind=arguments.workload,
                    num_prompts=num_prompts if repetition >= 0 else min(num_prompts, max(concurrency, 1)),
                    input_len=arguments.input_len,
                    output_len=arguments.output_len,
                    prefix_len=arguments.prefix_len,
                    # Other prompts each time: nobody's prefix cache knows them.
                    seed=arguments.seed + (repetition if repetition >= 0 else WARM_UP_SEED) + 1000 * concurrency,
                    dataset=arguments.dataset,
                )
                prompts = workload.make(tokenizer)
                due_ns = due_times(len(prompts), load.rate, workload.seed)
                for target in targets:
                    others = [other for other in targets if other is not target]
                    with nullcontext() if arguments.no_hold else held(others):
                        row = measure(target, prompts, due_ns, load, goal)
                    if repetition >= 0:
                        runs.setdefault((load.name, target.name), []).append(row)
                        progress.advance(task)
            loads[load.name] = (load, workload)
    rows = []
    for (load_name, server), found in runs.items():
        load, workload = loads[load_name]
        about = {"load": load_name, "server": server, "concurrency": load.concurrency, "request_rate": load.rate}
        rows.append({**about, **merged(found)})
    return {
        "machine": describe_host(),
        "workload": {
            "kind": arguments.workload, "api": arguments.api, "input_len": arguments.input_len,
            "output_len": arguments.output_len, "prefix_len": arguments.prefix_len, "goodput": arguments.goodput,
            "repetitions": arguments.repetitions,
        },
        "rows": rows,
    }  # fmt: skip


def _goal(arguments: argparse.Namespace) -> Goal:
    from tokring.bench.serve.run import Goal

    try:
        return Goal.parse(arguments.goodput) if arguments.goodput else Goal()
    except ValueError as error:
        raise ConfigError(f"--goodput: {error}") from None


def _targets(arguments: argparse.Namespace) -> list[Target]:
    from tokring.bench.serve.target import Target

    texts = arguments.servers or [DEFAULT_URL]
    targets = [Target.parse(text, arguments.model or "", arguments.api_key) for text in texts]
    if len({target.name for target in targets}) < len(targets):
        raise ConfigError("servers need names of their own: NAME=URL")
    return [target.with_listed_model() for target in targets]
