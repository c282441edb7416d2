"""Both readers, both writers: forged control words and ring bytes, under AddressSanitizer and UBSan.

The open-ended search with libFuzzer is `make fuzz-rings`; this is its short form, the same in every run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ipc.native_programs import build_sanitized

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and not os.environ.get("CI"), reason="needs g++")


def test_forged_rings_are_read_right_or_refused(tmp_path: Path) -> None:
    program = build_sanitized(tmp_path / "fuzz_rings", "fuzz_rings.cpp", "address,undefined", "-DSTANDALONE")
    done = subprocess.run([program, "20000", "1"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split()
    num_read, num_refused = int(words[1]), int(words[4].rstrip())
    assert num_read > 2000
    assert num_refused > 2000
