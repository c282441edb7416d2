"""Reload: front ends are replaced, new ones beside the old; engine and listening sockets stay."""

import logging

from tokring.launch.child_process import ChildProcess
from tokring.launch.children import Children
from tokring.launch.restarts import Restarts
from tokring.launch.server_log import ServerLog
from tokring.launch.service_manager import ServiceManager
from tokring.launch.spawner import Spawner
from tokring.launch.stats_pages import StatsPages
from tokring_ipc import ProcessPhase

log = logging.getLogger("tokring.launch")


class Reload:
    """Of one server, one after the other. Used only while it serves."""

    def __init__(
        self,
        num_frontends: int,
        children: Children,
        spawner: Spawner,
        restarts: Restarts,
        pages: StatsPages,
        server_log: ServerLog,
        service_manager: ServiceManager,
    ) -> None:
        # ---- whole process ----
        self._num_frontends = num_frontends
        self._children = children
        self._spawner = spawner
        self._restarts = restarts
        self._pages = pages
        self._log = server_log
        self._service_manager = service_manager
        # ---- this reload ----
        self._newcomers: list[ChildProcess] = []  # front ends that replace the others once all of them are ready
        self._is_wanted = False  # another one, once the last one is over

    def begin(self, cause: str) -> None:
        """Starts as many new front ends as there are places; if the last reload is not over, after that."""
        if self._newcomers or self._is_someone_retiring():
            log.info("%s: the next reload starts when the front ends that the last one replaced have ended", cause)
            self._is_wanted = True
            return
        count = self._num_frontends
        taken = {child.index for child in self._children.living("frontend")}
        taken |= {index for role, index in self._restarts.planned() if role == "frontend"}
        first = count if min(taken, default=0) < count else 0
        log.info("%s: starting %d new front ends", cause, count)
        self._service_manager.reloading()
        try:
            for index in range(first, first + count):
                self._newcomers.append(self._spawner.add_frontend(index))
        except OSError as error:
            self._fail(f"frontend {index} can't be started: {error}")

    def end_when_ready(self) -> None:
        """The old front ends accept no more and end with their last connection."""
        if not self._newcomers or not all(child.is_ready for child in self._newcomers):
            return
        self._restarts.forget("frontend")  # old ones that had died
        for child in self._children.living("frontend"):
            if child not in self._newcomers:
                retire(child)
        self._newcomers = []
        self._pages.supervisor.add("reloads")
        log.info("reloaded: new front ends serve, the old ones end with their last connection")
        self._service_manager.ready("reloaded")

    def is_about(self, child: ChildProcess) -> bool:
        """Whether the end of this one is not that of a front end that serves."""
        return child.is_retiring or child in self._newcomers

    def on_exit(self, child: ChildProcess) -> None:
        """An old front end is done; or a new one failed, then all new ones end and the old ones go on."""
        self._pages.mark_ended(child.place, ProcessPhase.STOPPED)
        if child in self._newcomers:
            self._fail(f"{child.name} (pid {child.pid}) {child.describe_end()}")
            if child.fatal is not None and child.fatal.traceback is None:
                log.error("%s", child.fatal.error)
            self._log.print_last_words(child)
        elif child.exit_code != 0 and not child.was_killed:
            log.error("%s (pid %d) %s while ending", child.name, child.pid, child.describe_end())
        else:
            log.info("%s (pid %d) has ended", child.name, child.pid)
        if self._is_wanted and not self._is_someone_retiring():
            self._is_wanted = False
            self.begin("reload again")

    def _fail(self, cause: str) -> None:
        """The old front ends go on."""
        log.error("reload failed: %s", cause)
        self._pages.supervisor.add("reloads_failed")
        for other in self._newcomers:
            retire(other)
        self._newcomers = []
        self._service_manager.ready("the last reload failed; the old front ends serve")

    def _is_someone_retiring(self) -> bool:
        return any(child.is_retiring for child in self._children.living("frontend"))


def retire(child: ChildProcess) -> None:
    """It may already have connections, also if it has not said that it is ready."""
    if not child.is_retiring:
        child.is_retiring = True
        child.send("retire")
