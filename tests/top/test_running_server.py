"""Servers are found by their pages, and only those that run."""

from __future__ import annotations

import argparse
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokring.top.reload_command import run_reload
from tokring.top.running_server import RunningServer, ServerNotFound
from tokring_ipc import Role, StatsPage, page_name

PID_AT, START_TIME_AT = 36, 40  # in the page's header


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with tokring and dies of SIGUSR2, as most do."""
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def stale_page(stranger: subprocess.Popen[bytes]) -> Iterator[StatsPage]:
    """What a killed server has left behind, its supervisor's pid being the stranger's now."""
    name = page_name(f"/tokring.{stranger.pid}.0badcafe", Role.SUPERVISOR, 0)
    with StatsPage.create(name, Role.SUPERVISOR) as page:
        write_owner(name, stranger.pid, start_time=1)
        yield page
        page.unlink()


def write_owner(name: str, pid: int, start_time: int) -> None:
    with open(f"/dev/shm{name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        struct.pack_into("=I", memory, PID_AT, pid)
        struct.pack_into("=Q", memory, START_TIME_AT, start_time)


def started(pid: int) -> int:
    """In clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_server_whose_pid_has_gone_to_another_process_is_not_found(
    stale_page: StatsPage, stranger: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(ServerNotFound):
        RunningServer.find(stranger.pid)
    write_owner(stale_page.name, stranger.pid, started(stranger.pid))
    with RunningServer.find(stranger.pid) as server:  # the same page of the same process, alive
        assert server.is_running


def test_a_server_that_has_ended_does_not_run_though_nobody_asks_for_its_exit_code(
    stale_page: StatsPage, stranger: subprocess.Popen[bytes]
) -> None:
    write_owner(stale_page.name, stranger.pid, started(stranger.pid))
    with RunningServer.find(stranger.pid) as server:
        assert server.is_running
        stranger.kill()
        os.waitid(os.P_PID, stranger.pid, os.WEXITED | os.WNOWAIT)  # a zombie it stays
        assert not server.is_running
        with pytest.raises(ServerNotFound):
            RunningServer.find(stranger.pid)


def test_reload_signals_no_stranger(stale_page: StatsPage, stranger: subprocess.Popen[bytes]) -> None:
    assert run_reload(argparse.Namespace(pid=stranger.pid)) == 1
    assert stranger.poll() is None
    stranger.communicate()  # its input ends: it was not told to end before
    assert stranger.returncode == 0
