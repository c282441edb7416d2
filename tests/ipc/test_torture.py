"""Both ends of a channel killed and stopped, in processes of their own. Minutes of it: `make torture`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ipc.native_programs import build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and not os.environ.get("CI"), reason="needs g++")


@pytest.fixture(scope="module")
def torture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("torture") / "torture", "torture.cpp", "-O2")


def run(program: Path, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_random_kills_and_stops_tear_lose_and_double_nothing(torture: Path) -> None:
    words = run(torture, "10", "1").split()
    num_engines, num_front_ends, num_requests = int(words[0]), int(words[3]), int(words[11])
    assert min(num_engines, num_front_ends) > 50
    assert num_requests > 10_000


def test_a_death_at_every_shared_word_leaves_the_survivor_with_what_was_published(torture: Path) -> None:
    assert int(run(torture, "points").split()[0]) > 100
