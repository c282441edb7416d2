"""The program `tokring`: reads the command line, hands over to what was asked for."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tokring.bench.command import add_bench_command
from tokring.config import ConfigError, ModelSettings
from tokring.options import add_arguments, build_config
from tokring.recording.file_format import RecordingError
from tokring.recording.recording import Recording
from tokring.top.command import add_top_command
from tokring.top.reload_command import add_reload_command

USAGE_ERROR = 2
REPLAYED_MODEL_SETTINGS = (
    "model",
    "tokenizer",
    "chat_template",
    "generation_config",
    "served_model_name",
    "max_model_len",
)


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
    add_reload_command(commands)
    add_bench_command(commands)
    replay = commands.add_parser(
        "replay",
        help="serve a recording made by `serve --record`, without a model",
        description="Serves with answers from a recording: a client that sends the recorded requests again gets the "
        "recorded answers, at their original pace or at full speed. Takes every option of `tokring serve`; "
        "tokenizer and names are those of the recording unless given.",
    )
    replay.add_argument("recording", metavar="FILE", help="file written by tokring serve --record")
    replay.add_argument("--speed", choices=("original", "full"), default="original", help="pace (default: original)")
    add_arguments(replay)
    replay.set_defaults(run=replay_recording)
    return parser


def serve_model(arguments: argparse.Namespace) -> int:
    """`tokring serve`: checks the configuration, then supervises until the end."""
    config = build_config(arguments, os.environ)
    from tokring.launch.supervisor import serve  # after the check: a mistyped flag is answered at once

    return serve(config, os.environ)


def replay_recording(arguments: argparse.Namespace) -> int:
    """`tokring replay FILE`: a server whose engine plays a recording."""
    try:
        recorded = Recording(Path(arguments.recording)).metadata
    except RecordingError as error:
        raise ConfigError(str(error)) from None
    arguments.replay, arguments.replay_speed = arguments.recording, arguments.speed
    config = build_config(arguments, os.environ)
    missing: dict[str, Any] = {
        name: tuple(recorded[name]) if isinstance(recorded[name], list) else recorded[name]
        for name in REPLAYED_MODEL_SETTINGS
        if recorded.get(name) and getattr(config.model, name) == getattr(ModelSettings(), name)
    }
    from tokring.launch.supervisor import serve

    return serve(replace(config, model=replace(config.model, **missing)), os.environ)


def open_standard_descriptors() -> None:
    """Puts /dev/null where descriptor 0, 1 or 2 is closed: else the next file or socket would get its number."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w", closefd=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a wrong command line, else what the command says."""
    open_standard_descriptors()
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
