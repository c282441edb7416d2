"""Whether a process died of its own doing: what its requests are to blame for, or what somebody else did to it."""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from io import FileIO
from pathlib import Path

# Nothing in the process sends itself these; the kernel sends the first one when memory is short.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
VMSTAT = Path("/proc/vmstat")


class OomKills:
    """How often the kernel has killed a process because memory was short, in our cgroup if it tells, else anywhere.

    Keeps the counter open: there may be no descriptor left when it is needed. Close at the end.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._counter: FileIO | None = None
        with contextlib.suppress(OSError):
            self._counter = FileIO(_own_counter() if path is None else path)
        self._before = deque([self._read()], maxlen=2)  # the older of the last two looks

    def look(self) -> None:
        """Remember the count: to be called every second or so."""
        self._before.append(self._read())

    def have_happened(self) -> bool:
        """Whether one has happened since the last look but one; True where the kernel does not tell."""
        now, before = self._read(), self._before[0]
        return now is None or before is None or now > before

    def close(self) -> None:
        if self._counter is not None:
            self._counter.close()

    def _read(self) -> int | None:
        if self._counter is None:
            return None
        try:
            self._counter.seek(0)
            lines = self._counter.read().split(b"\n")
            return next(int(line.split()[1]) for line in lines if line.startswith(b"oom_kill "))
        except (OSError, ValueError, IndexError, StopIteration):
            return None


def _own_counter() -> Path:
    """memory.events of the cgroup (version 2) that this process is in; the machine's counter if there is none."""
    try:
        entry = next(line for line in Path("/proc/self/cgroup").read_text().split("\n") if line.startswith("0::"))
    except (OSError, StopIteration):
        return VMSTAT
    events = Path("/sys/fs/cgroup") / entry.removeprefix("0::").lstrip("/") / "memory.events"
    return events if events.is_file() else VMSTAT


def is_own_fault(exit_code: int, *, was_hung: bool, oom_kills: OomKills) -> bool:
    """`exit_code` as subprocess gives it: negative for a signal. A hang that we ended is a fault; so is taking memory
    until the kernel kills. SIGKILL from anybody else says nothing about what the process was computing."""
    if was_hung or -exit_code not in FROM_OUTSIDE:
        return True
    return exit_code == -signal.SIGKILL and oom_kills.have_happened()
