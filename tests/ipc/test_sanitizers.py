"""The native ends under ThreadSanitizer and AddressSanitizer + UBSan, with every warning an error."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ipc.native_programs import build_sanitized

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and not os.environ.get("CI"), reason="needs g++")


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_two_threads_exchange_frames_cleanly(sanitizers: str, tmp_path: Path) -> None:
    program = build_sanitized(tmp_path / "two_threads", "two_threads.cpp", sanitizers)
    done = subprocess.run([program, "3000"], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3000\n", "")


def test_the_thread_sanitizer_catches_a_relaxed_publish(tmp_path: Path) -> None:
    program = build_sanitized(tmp_path / "mutant", "two_threads.cpp", "thread", "-DRELAXED_PUBLISH")
    done = subprocess.run(
        [program, "3000"],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert done.returncode != 0
    assert "data race" in done.stderr
