"""HangWatch: tells a process that hangs from one that idles, and what its threads are doing."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path

from tokring.launch.child_process import ChildProcess, Place
from tokring_ipc import Heartbeat, StatsPage, Watch

log = logging.getLogger("tokring.launch")

STACKS_GRACE_S = 1.0  # for a hung process to write its stacks, before it is killed
MAX_THREADS = 64  # shown
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "is in the kernel, uninterruptible",
    "T": "is stopped (SIGSTOP)",
    "Z": "dead",
}


class HangWatch:
    """Watches stats pages from a native thread, in ticks of its own: a suspended machine is no hang.

    Engine and front ends beat once a second from a thread of their own; `step_started_ns` is the engine's present
    step, or when a front end's event loop last came round. Use in a `with`.
    """

    def __init__(self, own_page: StatsPage, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._own_page = own_page
        self._heartbeat = Heartbeat(own_page)
        self._watches: dict[Place, Watch] = {}

    def add(self, place: Place, page: StatsPage) -> None:
        """The page of all processes that hold this place one after the other."""
        self._watches[place] = self._heartbeat.watch(page)

    def why_hung(self, place: Place) -> str | None:
        """What is wrong with the process there, in words; None if it beats and gets on."""
        watch = self._watches[place]
        if watch.silence_s > self.timeout_s:
            return f"has given no sign of life for {watch.silence_s:.0f} s"
        if watch.step_age_s > self.timeout_s:
            what = "has been in one step" if place[0] == "engine" else "has an event loop that stands still"
            return f"{what} for {watch.step_age_s:.0f} s"
        return None

    def end_hung(self, children: Iterable[ChildProcess], now: float) -> None:
        """A hang is a death that has to be brought about: its stacks go into the log, then it is to be killed."""
        for child in children:
            # What the watch saw of its predecessor, or of its start, must have passed.
            was_ready_s = now - child.ready_since if child.is_ready else 0.0
            if child.is_hung or child.kill_at < math.inf or was_ready_s <= self.timeout_s:
                continue
            reason = self.why_hung(child.place)
            if reason is None:
                continue
            child.is_hung = True
            self._own_page.add("hung_processes")
            log.error("%s (pid %d) %s (--step-timeout): it is killed", child.name, child.pid, reason)
            for line in describe_threads(child.pid):
                log.error("%s: %s", child.name, line)
            child.show_stacks()
            child.kill_at = now + STACKS_GRACE_S

    def __enter__(self) -> HangWatch:
        self._heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.stop()


def describe_threads(pid: int) -> list[str]:
    """A line for each thread: what the kernel knows of it, whether the process can still run or not."""
    return [_describe(task) for task in _tasks(pid)]


def _tasks(pid: int) -> Iterable[Path]:
    with contextlib.suppress(OSError):
        return sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))[:MAX_THREADS]
    return []


def _describe(task: Path) -> str:
    name, state = "?", "?"
    with contextlib.suppress(OSError, IndexError):
        # The name is in parentheses and may hold any character, a closing parenthesis too.
        before, _, after = _read(task / "stat").rpartition(")")
        name, state = before.split("(", 1)[1], after.split()[0]
    line = f"thread {task.name} ({name}) {_STATES.get(state, f'is in state {state}')}"
    with contextlib.suppress(OSError):
        if (channel := _read(task / "wchan").strip()) not in ("", "0"):
            line += f", waits in {channel}"
    with contextlib.suppress(OSError):
        if (number := _read(task / "syscall").split()[0]).isdigit():
            line += f", system call {number}"
    return line


def _read(path: Path) -> str:
    return os.fsdecode(path.read_bytes())
