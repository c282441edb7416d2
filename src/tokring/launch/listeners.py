"""The listening sockets: opened once by the supervisor, inherited by front ends only."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Mapping

from tokring.config import LISTEN_BACKLOG, ConfigError, ServerSettings

FIRST_SYSTEMD_FD = 3  # sd_listen_fds(3)


class Listeners:
    """Open listening sockets and the address to tell a person. Close removes a unix socket's file."""

    def __init__(self, sockets: list[socket.socket], url: str, uds: str | None = None) -> None:
        self.sockets = sockets
        self.url = url
        self._uds = uds
        self._uds_inode = os.stat(uds).st_ino if uds else None

    def fds(self) -> tuple[int, ...]:
        return tuple(listener.fileno() for listener in self.sockets)

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()
        self.sockets = []
        if self._uds is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._uds).st_ino == self._uds_inode:  # not another server's, bound after ours
                    os.unlink(self._uds)
            self._uds = None


def open_listeners(settings: ServerSettings, environment: Mapping[str, str]) -> Listeners:
    """Inherited sockets (LISTEN_FDS), else a unix socket, else TCP. Raises ConfigError naming what is in the way."""
    scheme = "https" if settings.ssl_certfile else "http"
    inherited = inherited_sockets(environment)
    if inherited:
        return Listeners(inherited, url_of(inherited[0], scheme))
    if settings.uds is not None:
        return Listeners([open_unix(settings.uds)], f"unix:{settings.uds}", settings.uds)
    sockets = open_tcp(settings.host, settings.port)
    return Listeners(sockets, url_of(sockets[0], scheme))


def inherited_sockets(environment: Mapping[str, str]) -> list[socket.socket]:
    """Sockets that a service manager opened for this very process, see sd_listen_fds(3)."""
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return []
    try:
        count = int(environment.get("LISTEN_FDS", "0"))
        return [socket.socket(fileno=FIRST_SYSTEMD_FD + i) for i in range(count)]
    except (ValueError, OSError) as error:
        raise ConfigError(f"LISTEN_FDS={environment.get('LISTEN_FDS')}: {error}") from None


def open_unix(path: str) -> socket.socket:
    """Binds a unix socket. One left by a dead server is replaced; a living server's, or any other file, is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_dead_socket(path)
        listener.bind(path)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--uds {path}: in use by another program, or not a socket") from None
        raise ConfigError(f"--uds {path}: {error.strerror}") from None
    return listener


def remove_dead_socket(path: str) -> None:
    """Unlinks a socket file that nobody listens on."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a living one that accepts nothing now has a full queue, and would keep us waiting
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)


def open_tcp(host: str, port: int) -> list[socket.socket]:
    """One socket for every address of the host, all on the same port. No SO_REUSEPORT: two servers must not share."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {error}") from None
    listeners: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            if listeners and port == 0:
                address = (address[0], listeners[0].getsockname()[1], *address[2:])
            listeners.append(listen_on(family, address))
    except OSError as error:
        for listener in listeners:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken by another program: choose another with --port, or 0 for a free one"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listeners


def listen_on(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # '::' means every interface of both families; a name's own IPv4 address gets a socket of its own.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket, scheme: str) -> str:
    """An address a person can open; a wildcard address is shown as the loopback one."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
