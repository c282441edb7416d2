"""Connection: ordered bytes to one client, on an own descriptor or handed back, and what waits for it."""

from __future__ import annotations

import os
import socket
import time

from tokring.server.token_path.reference.stream import Stream


class Connection:
    def __init__(self, connection_id: int, chunked: bool) -> None:
        # For the whole connection.
        self.id = connection_id
        self.streams: list[Stream] = []
        self.is_attached = False
        self._chunked = chunked
        self._socket: socket.socket | None = None  # on our dup(); None: bytes are handed back
        # Changing with the client's pace.
        self.output = bytearray()
        self.is_paused = True
        self.is_blocked = False
        self.is_dead = False
        self.is_ending = False  # write(end=True) was called and SENT not yet reported
        self.awaits_write = False  # a stream ended in the latest step: its last text leaves with what write() brings
        self.stalled_since_ns = 0

    def attach(self, fd: int) -> None:
        if fd >= 0:
            self._socket = socket.socket(fileno=os.dup(fd))
        self.is_attached = True
        self.is_paused = False

    @property
    def owns_descriptor(self) -> bool:
        return self._socket is not None

    @property
    def is_stalled(self) -> bool:
        return not self.is_dead and self.is_attached and (self.is_blocked or self.is_paused)

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def append(self, data: bytes) -> None:
        """One HTTP chunk, or the bare bytes."""
        self.output += b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def append_end(self) -> None:
        self.is_ending = True
        if self._chunked:
            self.output += b"0\r\n\r\n"

    def send(self) -> int:
        """Sends what the socket takes and returns how much. Raises OSError if the peer is gone."""
        assert self._socket is not None
        try:
            num_sent = self._socket.send(self.output, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            num_sent = 0
        del self.output[:num_sent]
        self.is_blocked = bool(self.output)
        return num_sent

    def backlog(self) -> int:
        return len(self.output) + sum(stream.num_ready_bytes() for stream in self.streams)

    def is_over_limit(self, max_bytes: int, max_age_ns: int) -> bool:
        """Checked while nothing can be sent; the age counts from the last progress."""
        backlog = self.backlog()
        if backlog == 0:
            self.stalled_since_ns = 0
            return False
        now = time.monotonic_ns()
        self.stalled_since_ns = self.stalled_since_ns or now
        return backlog > max_bytes or now - self.stalled_since_ns > max_age_ns

    def drop(self) -> None:
        """Nothing more will be sent: forgets what was queued."""
        self.is_dead = True
        self.output.clear()
        for stream in self.streams:
            stream.discard()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
