"""The real ring and channel code under a deterministic scheduler with C++'s weak memory, and its mutants."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ipc.native_programs import build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and not os.environ.get("CI"), reason="needs g++")


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("schedules") / "schedules", "schedules.cpp", "-O2")


def test_every_schedule_delivers_every_frame_once_whole_and_wakes_every_sleeper(schedules: Path) -> None:
    done = subprocess.run([schedules, "sound", "20000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 50_000


def test_every_weakened_or_missing_operation_is_caught(schedules: Path) -> None:
    done = subprocess.run([schedules, "mutants", "10000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" caught after ") >= 16
    assert "SURVIVES" not in done.stdout
