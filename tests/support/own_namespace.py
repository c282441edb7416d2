"""Programs in mount namespaces of their own, as another user, or under limits; skips where that is not allowed."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 110.0


def can_mount() -> bool:
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True)
    return done.returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs the right to mount")


def run_script(
    script: str, *, prepare: str = "true", prefix: Sequence[str] = (), environment: dict[str, str] | None = None
) -> str:
    """Standard output of a Python script that ran in a mount namespace after the shell commands `prepare`.

    `prefix`: a command that starts it with other rights or limits. Fails the test if it does not end with 0.
    """
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{prepare} && exec "$@"', "sh", *prefix, sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
