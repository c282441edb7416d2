"""How many threads compute on the CPU."""

from __future__ import annotations

import math
import os
from pathlib import Path

from tokring.engine.cgroup import cgroup_directories

FEW_CORES = 4


def default_cpu_threads(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that we may use; where they are many, one of them is left to the front end.

    Few are all taken: the engine is nicer than the front end, which a core serves at once when it wakes up.
    A CPU quota counts as that many cores: with more threads they would all stop together when it is used up.
    """
    cores = max(1, math.floor(min(len(os.sched_getaffinity(0)), quota_cores(proc, cgroup))))
    return cores if cores <= FEW_CORES else cores - 1


def quota_cores(proc: Path, cgroup: Path) -> float:
    """Seconds of CPU time in a second that the tightest control group above us allows; infinity: no limit."""
    try:
        directories = list(cgroup_directories("cpu", proc, cgroup))
    except OSError:
        return math.inf
    return min((_quota(directory, version) for directory, version in directories), default=math.inf)


def _quota(directory: Path, version: int) -> float:
    try:
        if version == 2:
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota, period = ((directory / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return int(quota) / int(period) if quota not in ("max", "-1") else math.inf
