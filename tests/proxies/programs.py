"""Real programs that tests drive: found, started on free ports in a temporary directory, ended by their pid."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

START_DEADLINE_S = 20.0


def needs(program: str) -> str:
    """Path of a program. Where it is missing the test is skipped, in CI it fails: .ci/run installs it."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if path is None:
        message = f"{program} is not installed"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextlib.contextmanager
def running(arguments: list[str], port: int, directory: Path, deadline_s: float = START_DEADLINE_S) -> Iterator[int]:
    """A program that listens on `port`; its output goes to a file, which a failure shows."""
    log = directory / "program.log"
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=directory)
    try:
        deadline = time.monotonic() + deadline_s
        while not _listens(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
