"""The native ends under ThreadSanitizer and AddressSanitizer + UBSan, with every warning an error."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).parent / "native" / "two_threads.cpp"
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-Wno-sign-conversion"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and not os.environ.get("CI"), reason="needs g++")


def build(program: Path, sanitizers: str, *defines: str) -> Path:
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", *WARNINGS, *defines]
        + ["-I", str(ROOT / "ipc" / "include"), str(SOURCE), "-o", str(program), "-pthread"],
        check=True,
    )
    return program


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_two_threads_exchange_frames_cleanly(sanitizers: str, tmp_path: Path) -> None:
    program = build(tmp_path / "two_threads", sanitizers)
    done = subprocess.run([program, "3000"], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3000\n", "")


def test_the_thread_sanitizer_catches_a_relaxed_publish(tmp_path: Path) -> None:
    program = build(tmp_path / "mutant", "thread", "-DRELAXED_PUBLISH")
    done = subprocess.run(
        [program, "3000"],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert done.returncode != 0
    assert "data race" in done.stderr
