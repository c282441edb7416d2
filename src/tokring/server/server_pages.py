"""ServerPages: the stats pages of every process of this server; /health, /load and /metrics come from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tokring.launch.child import StatsPageNames
from tokring_ipc import Heartbeat, ProcessPhase, StatsPage

MAX_HEARTBEAT_AGE_S = 3.0


@dataclass(frozen=True, slots=True)
class ServerPages:
    """engine_watches: the age of each engine's heartbeat and step, counted in this process's own ticks."""

    engines: Sequence[StatsPage]
    front_ends: Sequence[StatsPage]
    supervisor: Sequence[StatsPage]
    engine_watches: Sequence[Any]

    @classmethod
    def attach(cls, names: StatsPageNames, heartbeat: Heartbeat) -> "ServerPages":
        engines = [StatsPage.attach(name) for name in names.engine]
        return cls(
            engines,
            [StatsPage.attach(name) for name in names.frontend],
            [StatsPage.attach(names.supervisor)],
            [heartbeat.watch(page) for page in engines],
        )

    @property
    def all(self) -> list[StatsPage]:
        return [*self.engines, *self.front_ends, *self.supervisor]

    @property
    def front_ends_in_use(self) -> list[StatsPage]:
        """Without those that wait for a reload, and those whose processes a reload has ended."""
        return [page for page in self.front_ends if page.get("phase") not in (ProcessPhase.NONE, ProcessPhase.STOPPED)]

    def why_engine_is_unhealthy(self, step_timeout_s: float) -> str | None:
        """None if every engine is ready, beats, and is not stuck in a step."""
        for page, watch in zip(self.engines, self.engine_watches, strict=True):
            phase = ProcessPhase(page.get("phase"))
            if phase is not ProcessPhase.READY:
                return f"engine {page.index} is {phase.name.lower()}"
            if watch.silence_s > MAX_HEARTBEAT_AGE_S:
                return f"engine {page.index} has given no sign of life for {watch.silence_s:.0f} s"
            if watch.step_age_s > step_timeout_s:
                return f"engine {page.index} has been in one step for {watch.step_age_s:.0f} s"
        return None

    def load_metrics(self, load_format: str) -> str:
        """The value of ORCA's endpoint-load-metrics header: JSON, or TEXT for anything else."""
        used = sum(page.get("kv_blocks_used") for page in self.engines)
        total = sum(page.get("kv_blocks_total") for page in self.engines)
        values = {"kv_cache_usage_perc": used / total if total else 0.0, "num_requests_waiting": self.load()["waiting"]}
        if load_format.upper() == "JSON":
            return f"JSON {orjson.dumps({'named_metrics': values}).decode()}"
        return "TEXT " + ", ".join(f"named_metrics.{name}={value:g}" for name, value in values.items())

    def load(self) -> dict[str, int]:
        """Requests in progress, over all engines."""
        running = sum(page.get("num_requests_running") for page in self.engines)
        waiting = sum(page.get("num_requests_waiting") for page in self.engines)
        return {"server_load": running + waiting, "running": running, "waiting": waiting}
