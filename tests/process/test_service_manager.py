"""What systemd is told, and the sockets it hands over: without systemd, by a socket of our own."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.process.test_frontend_restart import answer
from tests.support.serving import START_DEADLINE_S, mock_server, tiny_model
from tokring.launch.service_manager import ServiceManager

Message = dict[str, str]
HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


class Listener:
    """The service manager's end of $NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._queues: dict[bool, SimpleQueue[Message]] = {False: SimpleQueue(), True: SimpleQueue()}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def next(self, *, watchdog: bool = False) -> Message:
        """The next message; those of the watchdog are told apart."""
        return self._queues[watchdog].get(timeout=START_DEADLINE_S)

    def _read(self) -> None:
        """At once: the kernel keeps ten messages."""
        while data := self._socket.recv(4096):
            message = dict(line.split("=", 1) for line in data.decode().split("\n"))
            self._queues["WATCHDOG" in message].put(message)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.join(30)
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "notify")
    yield listener
    listener.close()


def test_start_reload_and_end_are_told_and_the_watchdog_is_fed(manager: Listener, tmp_path: Path) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "500000"}
    with mock_server(environment=environment) as server:
        first = manager.next()
        assert first["STATUS"] == "loading" and int(first["EXTEND_TIMEOUT_USEC"]) > 60e6
        assert manager.next() == {"READY": "1", "STATUS": f"serving on {server.url}"}
        assert manager.next(watchdog=True) == {"WATCHDOG": "1"}
        server.send_signal(signal.SIGUSR2)
        reloading = manager.next()
        assert reloading["RELOADING"] == "1" and int(reloading["MONOTONIC_USEC"]) > 0
        assert manager.next() == {"READY": "1", "STATUS": "reloaded"}
        for child in server.children().values():
            assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(child.environ())
        server.send_signal(signal.SIGTERM)
        assert manager.next()["STOPPING"] == "1"
        assert server.wait_end() == 0


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 2.0),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_a_watchdog_for_another_process_is_not_ours(
    manager: Listener, tmp_path: Path, environment: dict[str, str], watchdog_s: float | None
) -> None:
    ours = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify"), **environment})
    assert ours.watchdog_s == watchdog_s
    for now in (ours.due or 0.0, (ours.due or 0.0) + 0.1, (ours.due or 0.0) + 1.5):
        ours.alive(now)
    ours.ready("x")
    assert [manager.next(watchdog=True) for _ in range(2 if watchdog_s else 0)] == [{"WATCHDOG": "1"}] * (
        2 if watchdog_s else 0
    )
    if not watchdog_s:
        assert manager.next() == {"READY": "1", "STATUS": "x"}
    ours.close()


def test_nobody_who_listens_is_no_harm(tmp_path: Path) -> None:
    for address in ("", "relative", str(tmp_path / "nobody"), "@nobody-" + tmp_path.name):
        manager = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000"})
        manager.ready("x")
        manager.alive(1e12)
        manager.close()
        manager.stopping("x", 1.0)


def test_an_abstract_socket_is_reached(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        name = f"tokring-test-{os.getpid()}"
        listener.bind("\0" + name)
        listener.settimeout(10)
        manager = ServiceManager({"NOTIFY_SOCKET": "@" + name})
        manager.ready("x")
        manager.close()
        assert listener.recv(100) == b"READY=1\nSTATUS=x"


def test_a_socket_that_is_handed_over_is_served_and_outlives_the_server() -> None:
    """As systemd does: descriptor 3, LISTEN_FDS=1 and LISTEN_PID, which is known only after the fork."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        command = [sys.executable, "-m", "tokring", "serve", "--engine", "mock", "--model", tiny_model()]
        process = subprocess.Popen(
            [sys.executable, "-c", HAND_OVER, str(listening.fileno()), *command],
            stderr=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            text=True,
        )
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if " ready after " in line)
            assert line.rstrip().endswith(f"http://127.0.0.1:{port}")

            class Server:
                url = f"http://127.0.0.1:{port}"

            assert answer(Server)["usage"]["completion_tokens"] == 4  # type: ignore[arg-type]
            process.terminate()
            process.stderr.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait(60)
            process.stderr.close()
        # It still listens: nobody was refused meanwhile, and the next server finds who came.
        socket.create_connection(("127.0.0.1", port), 10).close()
