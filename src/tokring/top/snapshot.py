"""Snapshot: everything `tokring top` reads of a server at one moment, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokring_ipc import Histogram, RingStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """One process of the server. Times in ns, from its start; the main thread of a front end is its event loop."""

    role: str  # "supervisor", "frontend" or "engine"
    index: int
    pid: int
    phase: str
    heartbeat_age_s: float  # -1: this process has no heartbeat
    cpu_ns: int  # all threads, those that have ended included
    main_cpu_ns: int
    main_wait_ns: int  # ready to run, but another process had the CPU
    rss_bytes: int

    @property
    def name(self) -> str:
        return self.role if self.role == "supervisor" else f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimit:
    """The CPU limit of the cgroup that the server runs in, and how often it has struck."""

    cores: float
    num_periods: int
    num_throttled_periods: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """counters and histograms: sums over all pages of the server, by the names of ipc/include/tokring/stats.hpp."""

    time_ns: int  # CLOCK_MONOTONIC
    processes: tuple[ProcessSnapshot, ...]
    counters: Mapping[str, int]
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    rings: tuple[RingStats, ...] = ()
    cpu_limit: CpuLimit | None = None  # None: no limit
    step_age_s: float = -1.0  # how long the engine has been in its present step; -1: in none
