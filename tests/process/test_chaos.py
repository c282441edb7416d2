"""The short forms of `make chaos` and `make soak`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # each wait inside has its own, shorter limit
MOCK = ("--model", "mock", "--step-ms", "2", "--seed", "1")


def run(module: str, report: Path, *arguments: str) -> dict[str, Any]:
    """The report of a run that passed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *MOCK, "--report", str(report), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


def test_no_stream_whose_connection_lives_fails_or_differs_while_engine_and_front_ends_are_killed(
    tmp_path: Path,
) -> None:
    lengths = ("--seconds", "6", "--streams", "12", "--tokens", "30")
    report = run("tests.chaos", tmp_path / "report", *lengths, "--engine-kills", "3", "--front-end-kills", "2")
    assert report["engine_restarts"] == 3 and report["frontend_restarts"] == 2
    assert report["load"]["right"] > 20 and report["requests_resumed"] > 0
    assert report["leaks"] == []


def test_under_load_nothing_grows_and_every_request_is_accounted_for(tmp_path: Path) -> None:
    report = run("tests.chaos.soak", tmp_path / "report", "--seconds", "8", "--streams", "6", "--tokens", "20")
    assert report["load"]["right"] > 20 and not any(report["balance"].values())
