"""The socket of --ipc-listen: whose it is, what may stand there already, what is left."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import select
import socket
from pathlib import Path

import pytest

from tokring.config import ConfigError
from tokring.engine.foreign_listener import ForeignListener


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(path))
    return client


def test_a_socket_that_nobody_listens_on_is_replaced_and_the_end_removes_ours(tmp_path: Path) -> None:
    path = tmp_path / "ipc.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(path))
    listener = ForeignListener(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    listener.close()
    assert not path.exists()


def test_another_servers_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ipc.sock"
    listener = ForeignListener(str(path))
    with pytest.raises(ConfigError, match="another server listens there"):
        ForeignListener(str(path))
    listener.close()


def test_another_server_that_accepts_nothing_now_is_not_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "ipc.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other, contextlib.ExitStack() as stack:
        other.bind(path)
        other.listen(0)
        is_full = False
        while not is_full:
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.setblocking(False)
            is_full = client.connect_ex(path) == errno.EAGAIN
        with pytest.raises(ConfigError, match="another server listens there"):
            ForeignListener(path)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        ForeignListener(str(path))
    assert path.read_text() == "mine"


def test_each_side_gets_only_its_own_doorbell_ends(tmp_path: Path) -> None:
    path = tmp_path / "ipc.sock"
    listener = ForeignListener(str(path))
    with connect(path) as client:
        ends = listener.accept()
        assert ends is not None
        greeting, fds, _, _ = socket.recv_fds(client, 4096, 4)
        assert len(greeting) == 24
        req_write, out_read = array.array("i", fds)
        os.write(req_write, b"r")
        os.write(ends.out_doorbell_fd, b"o")
        assert os.read(ends.req_doorbell_fd, 8) == b"r"
        assert os.read(out_read, 8) == b"o"
        ends.close()
        assert client.recv(1) == b""
        os.close(req_write)
        os.close(out_read)
    listener.close()


def test_when_descriptors_run_out_a_connection_is_closed_and_does_not_stay_in_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "ipc.sock"
    listener = ForeignListener(str(path))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connect(path) as client, connect(path) as second:
        num_before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest_descriptor() + 1, limits[1]))
        try:
            with contextlib.ExitStack() as all_taken:
                take_all(all_taken)
                for _ in range(2):
                    assert is_readable(listener)
                    assert listener.accept() is None
                assert not is_readable(listener)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert client.recv(1) == second.recv(1) == b""
        assert len(os.listdir("/proc/self/fd")) == num_before
    with connect(path) as client:
        ends = listener.accept()
        assert ends is not None
        ends.close()
    listener.close()


def test_when_others_were_quicker_to_take_what_is_kept_for_turning_away_it_is_kept_again(tmp_path: Path) -> None:
    path = tmp_path / "ipc.sock"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.closing(ForeignListener(str(path))) as listener, connect(path), connect(path):
        with contextlib.ExitStack() as taken:
            taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest_descriptor() + 1, limits[1]))
            take_all(taken)
            listener._give_up_spare()
            for _ in range(2):
                assert is_readable(listener)
                assert listener.accept() is None
                take_all(taken)
            assert not is_readable(listener)


def take_all(stack: contextlib.ExitStack) -> None:
    with contextlib.suppress(OSError):
        while True:
            stack.callback(os.close, os.dup(0))


def highest_descriptor() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def is_readable(listener: ForeignListener) -> bool:
    poll = select.poll()  # needs no descriptor
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))
