"""StepStats: what every step tells the stats page."""

from __future__ import annotations

import time
from typing import Protocol

from tokring.engine.scheduler import Scheduler


class StatsPage(Protocol):
    """The part of tokring_ipc.StatsPage that a step uses."""

    def add(self, name: str, amount: int) -> None: ...
    def set(self, name: str, value: int) -> None: ...
    def observe(self, name: str, value: float) -> None: ...


class StepStats:
    """Times the phases of a step and mirrors the scheduler's counters; without a page it only keeps the times."""

    def __init__(self, page: StatsPage | None) -> None:
        self._page = page
        self.phase_ns = dict.fromkeys(("receive", "schedule", "execute", "sample", "publish"), 0)  # of the last step
        self._mark_ns = 0
        self._preemptions = 0
        self._queries = 0
        self._hits = 0

    def begin(self) -> int:
        """Start a step; return its time in ns of CLOCK_MONOTONIC."""
        self._mark_ns = now_ns = time.monotonic_ns()
        return now_ns

    def end_phase(self, phase: str) -> None:
        """Attribute the time since the last mark to `phase`."""
        now_ns = time.monotonic_ns()
        self.phase_ns[phase] = now_ns - self._mark_ns
        self._mark_ns = now_ns

    def end_step(self, num_tokens: int, scheduler: Scheduler) -> None:
        """Record a step that computed num_tokens."""

    def end_idle(self, scheduler: Scheduler) -> None:
        """Record a look around that found nothing to compute."""

    def accepted(self) -> None:
        """Count a request taken in."""

    def refused(self) -> None:
        """Count a request refused at intake."""
