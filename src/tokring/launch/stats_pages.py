"""StatsPages: the stats pages of one server. They outlive the processes that write them, so counters never fall."""

from __future__ import annotations

import logging

from tokring.config import ConfigError
from tokring.launch.child import StatsPageNames
from tokring.launch.child_process import Place
from tokring.launch.file_size_limit import in_words
from tokring_ipc import STATS_PAGE_BYTES, ProcessPhase, Role, StatsPage, page_name, server_prefix, sweep_stale

log = logging.getLogger("tokring.launch")

GAUGES_OF_THE_LIVING = {
    "engine": ("num_requests_running", "num_requests_waiting", "step_started_ns", "kv_blocks_used", "paused"),
    "frontend": ("step_started_ns", "open_streams", "open_connections", "queued_requests", "stalled_connections"),
}


class StatsPages:
    """One page for each place, and `supervisor`, which their creator writes. Use in a `with`, or close()."""

    def __init__(self, num_frontends: int) -> None:
        """Creates them; removes those of servers that were killed. Raises ConfigError if they cannot be created."""
        if removed := sweep_stale():
            log.info("removed %d stats pages of servers that were killed", len(removed))
        prefix = server_prefix()
        self.names = StatsPageNames(
            supervisor=page_name(prefix, Role.SUPERVISOR, 0),
            frontend=tuple(page_name(prefix, Role.FRONTEND, index) for index in range(num_frontends)),
            engine=(page_name(prefix, Role.ENGINE, 0),),
        )
        self._created: list[StatsPage] = []
        self._of_place: dict[Place, StatsPage] = {}
        try:
            self.supervisor = self._create(self.names.supervisor, Role.SUPERVISOR, 0)
            for index, name in enumerate(self.names.frontend):
                self._of_place["frontend", index] = self._create(name, Role.FRONTEND, index)
            for index, name in enumerate(self.names.engine):
                self._of_place["engine", index] = self._create(name, Role.ENGINE, index)
        except OSError as error:
            self.close()
            needed = (1 + len(self.names.frontend) + len(self.names.engine)) * STATS_PAGE_BYTES
            raise ConfigError(
                f"cannot create the stats pages in /dev/shm, {needed >> 10} KiB together: {in_words(error)}"
            ) from None

    def items(self) -> list[tuple[Place, StatsPage]]:
        """Every place with its page; without the supervisor's."""
        return list(self._of_place.items())

    def of(self, place: Place) -> StatsPage:
        """The page of all processes that hold this place one after the other."""
        return self._of_place[place]

    def progress(self, place: Place) -> int:
        """Grows with the work that the processes of one place get done: steps, or requests answered."""
        page = self._of_place[place]
        return page.get("steps") if place[0] == "engine" else int(page.read().array("http_requests").sum())

    def mark_ended(self, place: Place, phase: ProcessPhase) -> None:
        """The process there has ended: `phase` tells whether another follows. Its counters still count."""
        page = self._of_place[place]
        page.set("phase", phase)
        for gauge in GAUGES_OF_THE_LIVING[place[0]]:
            page.set(gauge, 0)

    def close(self) -> None:
        """Removes them. Idempotent."""
        for page in self._created:
            page.close()
            page.unlink()
        self._created.clear()

    def _create(self, name: str, role: Role, index: int) -> StatsPage:
        page = StatsPage.create(name, role, index)
        self._created.append(page)
        return page

    def __enter__(self) -> StatsPages:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
