"""The program `tokring`: reads the command line, hands over to what was asked for."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from tokring.bench.command import add_bench_command
from tokring.config import ConfigError
from tokring.options import add_arguments, build_config
from tokring.top.command import add_top_command

USAGE_ERROR = 2


def package_version() -> str:
    try:
        return version("tokring")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokring", description="LLM inference server on shared-memory token rings.")
    parser.add_argument("--version", action="version", version=f"tokring {package_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over OpenAI's API",
        description="Serves a model over OpenAI's API. Every option is also an environment variable (TOKRING_PORT) and "
        "a key of a --config file (port: 8001).",
    )
    add_arguments(serve)
    serve.set_defaults(run=serve_model)
    add_top_command(commands)
    add_bench_command(commands)
    return parser


def serve_model(arguments: argparse.Namespace) -> int:
    """`tokring serve`: checks the configuration, then supervises until the end."""
    config = build_config(arguments, os.environ)
    from tokring.launch.supervisor import Supervisor  # after the check: a mistyped flag is answered at once

    return Supervisor(config, os.environ).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a wrong command line, else what the command says."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except ConfigError as error:
        print(f"tokring: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


if __name__ == "__main__":
    sys.exit(main())
