"""The listening sockets: one owner, clear messages, nothing left behind."""

import contextlib
import errno
import os
import socket
from pathlib import Path

import pytest

from tokring.config import ConfigError, ServerSettings
from tokring.launch.listeners import open_listeners


def test_port_zero_takes_a_free_port_and_the_address_names_it() -> None:
    listeners = open_listeners(ServerSettings(port=0), {})
    port = listeners.sockets[0].getsockname()[1]
    assert listeners.url == f"http://127.0.0.1:{port}"
    listeners.close()


def test_a_taken_port_is_named() -> None:
    first = open_listeners(ServerSettings(port=0), {})
    port = first.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port} .* is taken"):
        open_listeners(ServerSettings(port=port), {})
    first.close()


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match="--host no.such.host.invalid"):
        open_listeners(ServerSettings(host="no.such.host.invalid", port=0), {})


def test_listening_sockets_are_not_inherited_by_chance() -> None:
    listeners = open_listeners(ServerSettings(port=0), {})
    assert not any(os.get_inheritable(fd) for fd in listeners.fds())
    listeners.close()


def test_a_unix_socket_is_removed_on_close(tmp_path: Path) -> None:
    path = tmp_path / "tokring.sock"
    listeners = open_listeners(ServerSettings(uds=str(path)), {})
    assert path.is_socket()
    assert listeners.url == f"unix:{path}"
    listeners.close()
    assert not path.exists()


def test_a_unix_socket_of_a_dead_server_is_replaced_and_a_living_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "tokring.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    living = open_listeners(ServerSettings(uds=str(path)), {})
    with pytest.raises(ConfigError, match="in use"):
        open_listeners(ServerSettings(uds=str(path)), {})
    living.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        open_listeners(ServerSettings(uds=str(path)), {})
    assert path.read_text() == "mine"


def test_close_leaves_a_socket_that_another_server_has_bound_since(tmp_path: Path) -> None:
    path = tmp_path / "tokring.sock"
    first = open_listeners(ServerSettings(uds=str(path)), {})
    path.unlink()
    second = open_listeners(ServerSettings(uds=str(path)), {})
    first.close()
    assert path.is_socket()
    second.close()


def test_sockets_for_another_process_are_not_taken_over() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1"}
    listeners = open_listeners(ServerSettings(port=0), environment)
    assert len(listeners.sockets) == 1
    listeners.close()


def test_a_living_server_that_accepts_nothing_now_is_not_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "tokring.sock")
    with socket.socket(socket.AF_UNIX) as living, contextlib.ExitStack() as stack:
        living.bind(path)
        living.listen(0)
        is_full = False
        while not is_full:
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            is_full = client.connect_ex(path) == errno.EAGAIN
        with pytest.raises(ConfigError, match="in use"):
            open_listeners(ServerSettings(uds=path), {})
