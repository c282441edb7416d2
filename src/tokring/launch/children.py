"""Children: the living processes of one server, what they say, and by when they must end."""

import contextlib
import logging
import math
import selectors
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tokring.launch.child_process import ChildProcess, Role
from tokring.launch.log_merge import LineReader
from tokring.launch.server_log import ServerLog

log = logging.getLogger("tokring.launch")

REAP_TIMEOUT_S = 5.0
MAX_MESSAGES_AT_ONCE = 16  # of one child, before others have their turn


class Children:
    """Registers the descriptors of each with the loop's selector. The key's data is the function to call."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        server_log: ServerLog,
        on_message: Callable[[ChildProcess, dict[str, Any]], None],
        on_exit: Callable[[ChildProcess], None],
    ) -> None:
        """`on_exit`: the process has ended, and all that it said has been passed on."""
        self._selector = selector
        self._log = server_log
        self._on_message = on_message
        self._on_exit = on_exit
        self._children: list[ChildProcess] = []

    def add(self, child: ChildProcess) -> None:
        """One that has just been spawned. Raises OSError, and ends it, if the kernel has no memory to watch it."""
        try:
            self._selector.register(child.pidfd, selectors.EVENT_READ, partial(self._end, child))
            self._selector.register(child.link, selectors.EVENT_READ, partial(self._receive, child))
            for reader in (child.stdout, child.stderr):
                self._selector.register(reader.fd, selectors.EVENT_READ, partial(self._copy_lines, reader))
        except OSError:
            child.kill()
            child.reap()
            self._release(child)
            raise
        self._children.append(child)

    def living(self, role: Role | None = None) -> list[ChildProcess]:
        return [child for child in self._children if role in (None, child.role)]

    def ask_to_end(self, child: ChildProcess, deadline_s: float, kill_after_s: float) -> None:
        """Running requests get `deadline_s`; if it has not ended after `kill_after_s`, it is killed."""
        child.send("shutdown", deadline_s=deadline_s)
        child.kill_at = time.monotonic() + kill_after_s

    def kill_late(self, now: float) -> None:
        """Kills those that should have ended, or should be ready, by now."""
        for child in self._children:
            if now >= child.kill_at:
                if not child.is_hung:
                    log.warning("%s (pid %d) did not end in time: killed", child.name, child.pid)
                child.kill_at = math.inf
                child.kill()
            elif now >= child.ready_by:
                log.error("%s (pid %d) is still %s: killed", child.name, child.pid, child.phase)
                child.ready_by = math.inf
                child.kill()

    def due(self) -> list[float]:
        """When something is to be done about one of them, in time.monotonic()."""
        return [min(child.kill_at, child.ready_by, child.reconnect_at) for child in self._children]

    def kill_all(self) -> None:
        """On every way out: no child outlives the supervisor."""
        for child in self._children:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it dies when that lets go
                child.process.wait(REAP_TIMEOUT_S)
            child.close()

    def _receive(self, child: ChildProcess) -> None:
        """A bounded number of messages: whoever floods us keeps nobody else waiting."""
        try:
            for _ in range(MAX_MESSAGES_AT_ONCE):
                if (message := child.receive()) is None:
                    break
                self._on_message(child, message)
        except ValueError as error:  # no process of ours sends such a thing
            if not child.was_killed:
                log.error("%s (pid %d) sent what is no message: %s; it is killed", child.name, child.pid, error)
                child.kill()
        if child.has_hung_up:  # while it lives: else it would wake us without end
            self._unregister(child.link.fileno())

    def _copy_lines(self, reader: LineReader) -> None:
        if not self._log.copy_lines(reader):
            self._unregister(reader.fd)

    def _end(self, child: ChildProcess) -> None:
        child.reap()
        self._children.remove(child)
        self._receive(child)  # its last words
        for reader in (child.stdout, child.stderr):
            self._copy_lines(reader)
        self._release(child)
        self._on_exit(child)

    def _release(self, child: ChildProcess) -> None:
        """The descriptors of an ended one."""
        for watched in (child.pidfd, child.link.fileno(), child.stdout.fd, child.stderr.fd):
            self._unregister(watched)
        child.close()

    def _unregister(self, fd: int) -> None:
        with contextlib.suppress(KeyError):  # a log that was closed before
            self._selector.unregister(fd)


def call_ready(selector: selectors.BaseSelector, timeout_s: float) -> None:
    """Waits for events and calls what is registered for each, unless an event before it has ended that registration."""
    for key, _ in selector.select(timeout_s):
        # The same number may be another descriptor by now: of a process that was started because of an event before.
        if selector.get_map().get(key.fd) is key:
            key.data()
