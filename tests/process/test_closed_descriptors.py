"""A server whose starter has closed the standard descriptors: they are no sockets of ours by accident."""

import http.client
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.serving import tiny_model, wait_until


class UnixConnection(http.client.HTTPConnection):
    """To a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def is_healthy(path: Path) -> bool:
    connection = UnixConnection(path)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_a_server_without_standard_descriptors_serves_and_ends_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    command = [
        sys.executable,
        "-m",
        "tokring",
        "serve",
        "--engine",
        "mock",
        "--model",
        tiny_model(),
        "--uds",
        str(path),
    ]
    process = subprocess.Popen(["sh", "-c", f"exec {shlex.join(command)} <&- >&- 2>&-"])
    try:
        wait_until(lambda: process.poll() is not None or is_healthy(path), "the server is healthy", 90)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
