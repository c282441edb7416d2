"""What can be seen of a running server from outside: its stats pages, processes, descriptors and segments."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

import psutil

from tests.support.serving import ServerProcess
from tokring_ipc import ProcessPhase, Role, StatsPage, list_pages, read_sums


class ServerWatch:
    """Reads the stats pages, which outlive the processes that write them."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        names = list_pages(f"/tokring.{server.pid}.")
        self._pages = {(name.role, name.index): StatsPage.attach(name.name) for name in names}

    def total(self, name: str) -> int:
        """The sum of a counter or gauge over all processes."""
        return int(read_sums(list(self._pages.values()))[name])

    @property
    def engine(self) -> StatsPage:
        return self._pages[Role.ENGINE, 0]

    @property
    def supervisor(self) -> StatsPage:
        return self._pages[Role.SUPERVISOR, 0]

    def engine_is_ready(self) -> bool:
        return self.engine.get("phase") == ProcessPhase.READY

    def is_idle(self) -> bool:
        gauges = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
        return all(self.engine.get(name) == 0 for name in gauges)

    def process(self, name: str) -> psutil.Process | None:
        """A child by its title, if it runs."""
        return self._server.children().get(name)

    def holdings(self) -> dict[str, Holdings]:
        """Of the supervisor and every child, by title."""
        processes = {"supervisor": psutil.Process(self._server.pid), **self._server.children()}
        found = {}
        for name, process in processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                found[name] = Holdings.of(process)
        return found

    def close(self) -> None:
        for page in self._pages.values():
            page.close()


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one process holds."""

    descriptors: int
    segments: int
    rss_bytes: int
    zombies: int

    @classmethod
    def of(cls, process: psutil.Process) -> Holdings:
        with open(f"/proc/{process.pid}/maps") as maps:
            segments = set(re.findall(r"(\d+) +/memfd:tokring", maps.read()))
        zombies = sum(child.status() == psutil.STATUS_ZOMBIE for child in process.children())
        return cls(process.num_fds(), len(segments), process.memory_info().rss, zombies)
