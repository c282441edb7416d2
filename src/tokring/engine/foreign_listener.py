"""ForeignListener: `--ipc-listen PATH`, where front ends that are not ours connect to the engine."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct

import numpy as np

from tokring.config import ConfigError
from tokring.engine.engine_ends import EngineEnds
from tokring_ipc import LAYOUT_HASH, LAYOUT_VERSION, ControlKind, struct_dtype
from tokring_ipc._core import CONTROL_MAGIC

_UCRED = struct.Struct("3i")  # pid, uid, gid


class ForeignListener:
    """A SOCK_SEQPACKET socket in the file system, for processes of this user (and root) only.

    The engine makes the doorbells and sends the front end's ends first; then the handshake is as everywhere.
    """

    def __init__(self, path: str) -> None:
        """Listen at `path`; a socket that nobody listens on is replaced. Raises ConfigError."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            remove_stale_socket(path)
            # The mode of a socket counts from bind() on: nobody else gets in between.
            old_mask = os.umask(0o177)
            try:
                self._socket.bind(path)
            finally:
                os.umask(old_mask)
            self._socket.listen(16)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"--ipc-listen {path}: {error.strerror or error}") from None
        self._inode = os.stat(path).st_ino
        self._spare_fd = -1
        self._keep_spare()

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> EngineEnds | None:
        """Take one connection; None if it went away, belongs to another user, or finds no descriptors left."""
        self._keep_spare()  # another thread may have been quicker when it was given up
        try:
            control, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_one_away()
            return None
        _, uid, _ = _UCRED.unpack(control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid not in (os.getuid(), 0):
            control.close()
            return None
        made: list[int] = []
        try:
            made += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            made += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            req_read, req_write, out_read, out_write = made
            control.setblocking(False)
            socket.send_fds(control, [greeting()], [req_write, out_read])
        except OSError:  # it went away, or descriptors have run out
            control.close()
            for fd in made:
                os.close(fd)
            return None
        os.close(req_write)
        os.close(out_read)
        return EngineEnds(control, req_read, out_write)

    def close(self) -> None:
        """Remove the socket, unless another server has put its own there."""
        self._socket.close()
        self._give_up_spare()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)

    def _turn_one_away(self) -> None:
        """With the descriptor kept for this: a connection left in the queue would wake the engine without end."""
        self._give_up_spare()
        with contextlib.suppress(OSError):
            self._socket.accept()[0].close()
        self._keep_spare()

    def _keep_spare(self) -> None:
        if self._spare_fd < 0:
            with contextlib.suppress(OSError):
                self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_up_spare(self) -> None:
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1


def greeting() -> bytes:
    """A bare ControlHeader of kind HELLO; the doorbells travel with it."""
    header = np.zeros((), struct_dtype("ControlHeader"))
    header["magic"] = CONTROL_MAGIC
    header["kind"] = ControlKind.HELLO
    header["layout_version"] = LAYOUT_VERSION
    header["layout_hash"] = LAYOUT_HASH
    header["pid"] = os.getpid()
    return header.tobytes()


def remove_stale_socket(path: str) -> None:
    """Raise OSError if `path` is no socket, or if somebody listens there."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(0, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)  # a living one that accepts nothing now has a full queue, and would keep us waiting
        if probe.connect_ex(path) in (0, errno.EAGAIN):
            raise OSError(0, "another server listens there")
    os.unlink(path)
