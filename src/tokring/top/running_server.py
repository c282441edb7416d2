"""RunningServer: a server on this machine, found by its stats pages and read without its taking part."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from tokring.top.process_use import is_zombie, read_cpu_limit, read_process_use
from tokring.top.snapshot import ProcessSnapshot, Snapshot
from tokring_ipc import (
    STATS_TABLE,
    AttachError,
    Histogram,
    PageName,
    ProcessPhase,
    Role,
    StatsPage,
    list_pages,
    read_rings,
    read_sums,
)

SHOWN_HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds")


class ServerNotFound(Exception):
    """One line for the user."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Use in a `with`. The pages are mapped read-only: reading costs the server nothing."""

    supervisor_pid: int
    pages: tuple[StatsPage, ...]
    pids: tuple[int, ...]  # of the pages' writers when found

    @classmethod
    def find(cls, pid: int | None = None) -> RunningServer:
        """The only server that runs here, or the one to which the process `pid` belongs. Raises ServerNotFound."""
        found = [server for names in _names_by_server() if (server := cls._attach(names)) is not None]
        chosen = [server for server in found if pid is None or pid in server.pids]
        for server in found:
            if server not in chosen or len(chosen) > 1:
                server.close()
        if len(chosen) == 1:
            return chosen[0]
        supervisors = ", ".join(str(server.supervisor_pid) for server in found)
        if not found:
            raise ServerNotFound("no running server found on this machine (of this user): start one by `tokring serve`")
        if not chosen:
            raise ServerNotFound(f"no server has a process {pid}; running servers: --pid {supervisors}")
        raise ServerNotFound(f"several servers are running, choose one with --pid: {supervisors}")

    @classmethod
    def _attach(cls, names: list[PageName]) -> RunningServer | None:
        """None if the server has ended, belongs to another user or to another version of tokring."""
        pages: list[StatsPage] = []
        try:
            pages.extend(StatsPage.attach(name.name) for name in names)
        except (OSError, AttachError):
            pass
        pids = tuple(page.pid for page in pages)
        server = cls(names[0].supervisor_pid, tuple(pages), (names[0].supervisor_pid, *pids))
        if len(pages) == len(names) and server.is_running:
            return server
        for page in pages:
            page.close()
        return None

    @property
    def is_running(self) -> bool:
        """Whether the process that made the pages runs; another may have got its pid meanwhile."""
        has_owner = any(page.pid == self.supervisor_pid and page.owner_is_running for page in self.pages)
        return has_owner and not is_zombie(self.supervisor_pid)

    def snapshot(self) -> Snapshot:
        """What every process has counted until now."""
        sums = read_sums(self.pages)
        engines = [page for page in self.pages if page.role == Role.ENGINE]
        processes = (self._process(page) for page in self.pages)
        return Snapshot(
            time_ns=time.monotonic_ns(),
            processes=tuple(process for process in processes if process is not None),
            counters={row.name: sums[row.name] for row in STATS_TABLE if row.kind != "h" and row.instances == 1},
            histograms={name: sums.histogram(name) for name in SHOWN_HISTOGRAMS},
            rings=tuple(read_rings(page for page in self.pages if not _waits_for_reload(page))),
            cpu_limit=read_cpu_limit(self.supervisor_pid),
            step_age_s=max((page.ages[1] for page in engines), default=-1.0),
        )

    def _process(self, page: StatsPage) -> ProcessSnapshot | None:
        is_supervisor = page.role == Role.SUPERVISOR
        if _waits_for_reload(page):
            return None
        pid = self.supervisor_pid if is_supervisor else page.pid
        use = read_process_use(pid) if page.owner_is_running else None
        if use is None:
            return None
        return ProcessSnapshot(
            role=Role(page.role).name.lower(),
            index=page.index,
            pid=pid,
            phase="" if is_supervisor else ProcessPhase(page.get("phase")).name.lower(),
            heartbeat_age_s=page.ages[0] if page.get("heartbeat_ns") else -1.0,
            cpu_ns=use.cpu_ns,
            main_cpu_ns=use.main_cpu_ns,
            main_wait_ns=use.main_wait_ns,
            rss_bytes=use.rss_bytes,
        )

    def close(self) -> None:
        for page in self.pages:
            page.close()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(OSError):
            self.close()


def _waits_for_reload(page: StatsPage) -> bool:
    """Whether this is the place of a front end that a reload will start, or whose process it has ended."""
    return page.role == Role.FRONTEND and page.get("phase") in (ProcessPhase.NONE, ProcessPhase.STOPPED)


def _names_by_server() -> list[list[PageName]]:
    servers: dict[tuple[int, str], list[PageName]] = {}
    for name in list_pages():
        servers.setdefault((name.supervisor_pid, name.token), []).append(name)
    return list(servers.values())


def quantile(before: Histogram | None, after: Histogram, share: float) -> float | None:
    """The value below which `share` of the observations between two readings lie, interpolated within its bucket.

    None: there were none. An observation above the last bound counts as the last bound.
    """
    earlier = before.buckets if before is not None else (0,) * len(after.buckets)
    counts = [max(0, late - early) for early, late in zip(earlier, after.buckets, strict=True)]
    left = share * sum(counts)
    if not any(counts):
        return None
    lower = 0.0
    for upper, count in zip(after.bounds, counts, strict=False):
        if count and left <= count:
            return lower + (upper - lower) * left / count
        left -= count
        lower = upper
    return after.bounds[-1]
