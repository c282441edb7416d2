"""Restarts: which processes that died are followed by others, and when those start."""

import logging
import time

from tokring.config import Config
from tokring.launch.child_process import ChildProcess, Place, Role
from tokring.launch.death_cause import OomKills, is_own_fault
from tokring.launch.restart_policy import RestartPolicy
from tokring.launch.server_log import ServerLog
from tokring.launch.spawner import Spawner
from tokring.launch.stats_pages import StatsPages
from tokring_ipc import ProcessPhase

log = logging.getLogger("tokring.launch")

STEADY_S = 10.0  # a process that was ready for so long did not die of its start


class Restarts:
    """Of one server. Close at the end."""

    def __init__(self, config: Config, pages: StatsPages, spawner: Spawner, server_log: ServerLog) -> None:
        # ---- whole process ----
        self._pages = pages
        self._spawner = spawner
        self._log = server_log
        self._oom_kills = OomKills()
        num_restarts = {"engine": config.num_engine_restarts, "frontend": config.launch.frontend_restarts}
        self._policies = {place: RestartPolicy(num_restarts[place[0]]) for place, _ in pages.items()}
        # ---- between a death and the next start ----
        self._due: dict[Place, float] = {}  # time.monotonic()
        self._engine_died_by_itself = False

    def plan(self, child: ChildProcess) -> bool:
        """After a death. False: no other process takes its place, it has died too often."""
        was_steady = child.is_ready and time.monotonic() - child.ready_since >= STEADY_S
        made_progress = was_steady or self._pages.progress(child.place) > child.progress_at_spawn
        if child.role == "engine":
            assert child.exit_code is not None
            self._engine_died_by_itself = is_own_fault(
                child.exit_code, was_hung=child.is_hung, oom_kills=self._oom_kills
            )
        what_happened = f"{child.name} (pid {child.pid}) {child.describe_end()}"
        if not self._plan_next(child.place, what_happened, made_progress=made_progress):
            return False
        self._pages.mark_ended(child.place, ProcessPhase.STARTING)
        self._log.print_last_words(child)
        return True

    def planned(self) -> dict[Place, float]:
        """Place -> when it is due, in time.monotonic()."""
        return dict(self._due)

    def forget(self, role: Role | None = None) -> None:
        """Those of one role, or all, are not to be."""
        for place in [place for place in self._due if role in (None, place[0])]:
            del self._due[place]
            self._pages.mark_ended(place, ProcessPhase.STOPPED)

    def start_due(self, now: float) -> str | None:
        """Starts those whose time has come. What cannot be started is tried again, as after a death without progress.

        Returns what could not be started, and why, once that has failed too often.
        """
        for place in [place for place, due in self._due.items() if now >= due]:
            del self._due[place]
            try:
                self._start(place)
            except OSError as error:
                what_happened = f"{place[0]} {place[1]} can't be started: {error}"
                if not self._plan_next(place, what_happened, made_progress=False):
                    return what_happened
        return None

    def look_for_oom_kills(self) -> None:
        """To be called every second or so: a SIGKILL soon after one is taken for the kernel's."""
        self._oom_kills.look()

    def close(self) -> None:
        self._oom_kills.close()

    def _start(self, place: Place) -> None:
        role, index = place
        if role == "engine":
            self._spawner.restart_engine(died_by_itself=self._engine_died_by_itself)
        else:
            self._spawner.restart_frontend(index)

    def _plan_next(self, place: Place, what_happened: str, *, made_progress: bool) -> bool:
        """False: it has happened too often."""
        back_off_s = self._policies[place].back_off_s(made_progress=made_progress)
        if back_off_s is None:
            return False
        log.error("%s; another one starts %s", what_happened, f"in {back_off_s:g} s" if back_off_s else "now")
        self._due[place] = time.monotonic() + back_off_s
        return True
