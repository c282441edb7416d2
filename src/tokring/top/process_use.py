"""What the kernel says about a process: CPU time, waiting for a CPU, memory, and the CPU limit of its cgroup."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tokring.top.snapshot import CpuLimit

CPUCLOCK_SCHED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    cpu_ns: int
    main_cpu_ns: int
    main_wait_ns: int
    rss_bytes: int


def read_process_use(pid: int) -> ProcessUse | None:
    """None if there is no such process (any more)."""
    try:
        main_cpu_ns, main_wait_ns, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text().split())
        resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return ProcessUse(
            cpu_ns=time.clock_gettime_ns(cpu_clock_of(pid)),
            main_cpu_ns=main_cpu_ns,
            main_wait_ns=main_wait_ns,
            rss_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
        )
    except (OSError, ValueError):
        return None


def is_zombie(pid: int) -> bool:
    """Whether it has ended, and its parent has not asked for its exit code (some never do)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return False


def cpu_clock_of(pid: int) -> int:
    """The clock that shows a process's CPU time, as clock_getcpuclockid(3) makes it."""
    return (~pid << 3) | CPUCLOCK_SCHED


def read_cpu_limit(pid: int, *, proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> CpuLimit | None:
    """The tightest CPU limit of a process's cgroup and its parents, version 2 or 1; None if there is none."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            limits += [_limit_v2(group) for group in _with_parents(mount, path)]
        elif "cpu" in controllers.split(","):
            limits += [_limit_v1(group) for group in _with_parents(mount / controllers, path)]
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.cores, default=None)


def _with_parents(root: Path, path: str) -> list[Path]:
    """The group's directory up to the mount point. In a container the path may lead outside of what is mounted."""
    group = root / path.lstrip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(root))]


def _limit_v2(group: Path) -> CpuLimit | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else _limit(group, int(quota), int(period))


def _limit_v1(group: Path) -> CpuLimit | None:
    try:
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota <= 0 else _limit(group, quota, period)


def _limit(group: Path, quota: int, period: int) -> CpuLimit:
    text = (group / "cpu.stat").read_text() if (group / "cpu.stat").exists() else ""
    stat = dict(line.split(maxsplit=1) for line in text.splitlines())
    return CpuLimit(
        cores=quota / period,
        num_periods=int(stat.get("nr_periods", 0)),
        num_throttled_periods=int(stat.get("nr_throttled", 0)),
    )
