"""Usage: what the kernel charges a process with, and how busy others keep its cores."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import asdict, dataclass

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MILLISECONDS_PER_TICK = 1000 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the whole process, all its threads."""

    wall_ns: int
    cpu_ns: int
    voluntary_switches: int
    involuntary_switches: int

    @classmethod
    def now(cls) -> Usage:
        counted = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.monotonic_ns(), time.process_time_ns(), counted.ru_nvcsw, counted.ru_nivcsw)

    def since(self, earlier: Usage) -> dict[str, int]:
        before = asdict(earlier)
        return {name: value - before[name] for name, value in asdict(self).items()}


def busy_ms(cores: tuple[int, int]) -> float:
    """Milliseconds that these cores have not been idle since boot, stolen time included; in ticks of mostly 10 ms."""
    names = {f"cpu{core}" for core in cores}
    total = 0
    with open("/proc/stat") as stat:
        for line in stat:
            name, *ticks = line.split()
            if name in names:
                total += sum(int(tick) for index, tick in enumerate(ticks[:8]) if index not in (3, 4))
    return total * MILLISECONDS_PER_TICK
