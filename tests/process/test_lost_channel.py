"""A channel that ends while both its ends live, and messages to the supervisor that no process of ours sends."""

import contextlib
import ctypes
import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.process.test_engine_restart import ask, metric, num_running
from tests.process.test_frontend_restart import answer
from tests.support.serving import START_DEADLINE_S, ServerProcess, mock_server, wait_until

SYS_PIDFD_GETFD = 438
BODY: dict[str, Any] = {
    "prompt": list(range(9, 50)),
    "max_tokens": 200,
    "ignore_eos": True,
    "temperature": 0.8,
    "seed": 4,
}


def packet_sockets(process: psutil.Process) -> dict[int, socket.socket]:
    """Copies of a process's SOCK_SEQPACKET sockets by descriptor: one a channel, and the one to the supervisor."""
    found = {}
    pidfd = os.pidfd_open(process.pid)
    for number in sorted(int(name) for name in os.listdir(f"/proc/{process.pid}/fd")):
        try:
            if not os.readlink(f"/proc/{process.pid}/fd/{number}").startswith("socket:"):
                continue
        except FileNotFoundError:  # closed meanwhile
            continue
        fd = ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_GETFD, pidfd, number, 0)
        if fd < 0:
            if ctypes.get_errno() == errno.EBADF:  # closed meanwhile
                continue
            pytest.skip(f"pidfd_getfd(2): {os.strerror(ctypes.get_errno())}")
        copy = socket.socket(fileno=fd)
        if copy.family == socket.AF_UNIX and copy.type & 0xF == socket.SOCK_SEQPACKET:
            found[number] = copy
        else:
            copy.close()
    os.close(pidfd)
    return found


def inodes(process: psutil.Process) -> dict[int, int]:
    """Of its packet sockets, by descriptor."""
    found = {}
    for number, copy in packet_sockets(process).items():
        with copy:
            found[number] = os.fstat(copy.fileno()).st_ino
    return found


def supervisor_descriptor(server: ServerProcess, process: psutil.Process) -> int:
    """Which of its packet sockets leads to the supervisor: its inode is the next one after that of the other end."""
    supervisors = set(inodes(psutil.Process(server.pid)).values())
    [number] = [number for number, inode in inodes(process).items() if inode - 1 in supervisors]
    return number


def end_channels(engine: psutil.Process, supervisor_fd: int) -> None:
    """Ends every control socket of the engine as if it had closed them."""
    for number, copy in packet_sockets(engine).items():
        if number != supervisor_fd:
            copy.shutdown(socket.SHUT_RDWR)
        copy.close()


def test_a_front_end_whose_channel_ends_gets_another_and_at_the_second_time_is_replaced() -> None:
    with mock_server("--mock-step-ms", "5") as server, ThreadPoolExecutor(3) as pool:
        children = server.children()
        engine = children["engine 0"]
        supervisor_fd = supervisor_descriptor(server, engine)
        bodies = [{**BODY, "seed": index} for index in range(3)]
        expected = [ask(server.url, "completions", body) for body in bodies]
        answers = [pool.submit(ask, server.url, "completions", body) for body in bodies]
        wait_until(lambda: num_running(server) == 3, "all run")
        end_channels(engine, supervisor_fd)
        # The same text; found in the cache is more than at first.
        assert [one.result(START_DEADLINE_S)[:2] for one in answers] == [one[:2] for one in expected]
        assert "frontend 0 (pid" in server.log and "it gets another" in server.log
        assert metric(server, "requests_resumed") == 3
        wait_until(lambda: server.health() == 200, "healthy again")
        assert server.children() == children
        end_channels(engine, supervisor_fd)
        wait_until(lambda: server.children().get("frontend 0") not in (None, children["frontend 0"]), "replaced", 90)
        assert answer(server)["usage"]["completion_tokens"] == 4
        assert server.children()["engine 0"] == engine


@pytest.mark.parametrize("garbage", [b"\xff not JSON", b"[1]", b'{"type": 7}', b'{"phase": "x"}'])
def test_a_front_end_that_sends_the_supervisor_garbage_is_replaced(
    two_front_ends: ServerProcess, garbage: bytes
) -> None:
    server = two_front_ends
    children = server.children()
    victim = children["frontend 1"]
    supervisor_fd = supervisor_descriptor(server, victim)
    for number, copy in packet_sockets(victim).items():
        with copy:
            if number == supervisor_fd:
                with contextlib.suppress(BrokenPipeError):  # it is quick
                    for _ in range(40):  # no flood keeps the supervisor from anything
                        copy.send(garbage)
    wait_until(lambda: server.children().get("frontend 1") not in (None, victim), "it is replaced", START_DEADLINE_S)
    assert answer(server)["usage"]["completion_tokens"] == 4
    wait_until(lambda: f"frontend 1 (pid {victim.pid}) sent what is no message" in server.log, "it is logged")
    others = ("frontend 0", "engine 0")
    assert [server.children()[name] for name in others] == [children[name] for name in others]


@pytest.fixture(scope="module")
def two_front_ends():
    with mock_server("--api-server-count", "2") as server:
        yield server
