"""Spawner: starts the processes of one server, wired to each other."""

import os
from collections.abc import Sequence

from tokring import step_rows, vetted_grammars
from tokring.config import Config, Device
from tokring.launch.channel_wiring import ChannelWiring, fds_of
from tokring.launch.child_process import ChildProcess
from tokring.launch.children import Children
from tokring.launch.stats_pages import StatsPages


class Spawner:
    """Use on the main thread only: children die with the thread that started them. Close at the end."""

    def __init__(self, config: Config, pages: StatsPages, listen_fds: tuple[int, ...], children: Children) -> None:
        # ---- whole process ----
        self._config = config
        self._pages = pages
        self._listen_fds = listen_fds
        self._children = children
        self._vetted_grammars_fd = vetted_grammars.create()  # for one engine after the other
        self._device: Device | None = None
        # ---- this engine process, or the last one ----
        self._step_rows_fd = -1  # what it is computing; read by front ends when it has died

    def start_all(self) -> None:
        """Starts the front ends, so that the port answers at once, and the engine."""
        wirings = [ChannelWiring.create(frontend, 0) for frontend in range(self._config.server.api_server_count)]
        try:
            for wiring in wirings:
                self._spawn_frontend(wiring, listens_at_once=True)
                wiring.close_ends(wiring.frontend_ends)
            self._spawn_engine(wirings)
        finally:
            for wiring in wirings:
                wiring.close()

    def restart_engine(self, *, died_by_itself: bool) -> None:
        """A new engine on new channels; each front end gets its ends, and what the dead engine was computing."""
        self._pages.supervisor.add("engine_restarts")
        old_rows_fd = self._step_rows_fd
        front_ends = self._children.living("frontend")
        wirings = [ChannelWiring.create(child.index, 0) for child in front_ends]
        try:
            self._expect_ready(self._spawn_engine(wirings))
            for child, wiring in zip(front_ends, wirings, strict=True):
                fds = (*fds_of(wiring.frontend_ends), old_rows_fd)
                child.send_channel(fds, engine_died_by_itself=died_by_itself)
        finally:
            os.close(old_rows_fd)
            for wiring in wirings:
                wiring.close()

    def restart_frontend(self, index: int) -> None:
        self._pages.supervisor.add("frontend_restarts")
        self.add_frontend(index)

    def add_frontend(self, index: int) -> ChildProcess:
        """A new front end on the same sockets; the engine gets its end of their channel. If there is no engine now,
        the next one's follows."""
        wiring = ChannelWiring.create(index, 0)
        try:
            child = self._spawn_frontend(wiring, listens_at_once=False)
            self._expect_ready(child)
            for engine in self._children.living("engine"):
                engine.send_fds(fds_of(wiring.engine_ends), "channel", frontend=index)
            return child
        finally:
            wiring.close()

    def rewire(self, frontend: ChildProcess, engine: ChildProcess) -> None:
        """Another channel for two processes that live."""
        wiring = ChannelWiring.create(frontend.index, engine.index)
        engine.send_fds(fds_of(wiring.engine_ends), "channel", frontend=frontend.index)
        frontend.send_channel(fds_of(wiring.frontend_ends), engine_died_by_itself=False)
        wiring.close()

    def settle_device(self, device: Device) -> None:
        """What the engine has chosen to compute on: those after it must not choose another."""
        self._device = device

    def close(self) -> None:
        os.close(self._vetted_grammars_fd)

    def _spawn_frontend(self, wiring: ChannelWiring, *, listens_at_once: bool) -> ChildProcess:
        index, ends = wiring.frontend_ends.frontend, [wiring.frontend_ends]
        return self._add(
            ChildProcess.spawn(
                "frontend", index, self._config, self._pages.names, ends, self._listen_fds, listens_at_once
            )
        )

    def _spawn_engine(self, wirings: Sequence[ChannelWiring]) -> ChildProcess:
        self._step_rows_fd = step_rows.create(self._config.engine.max_num_seqs)
        ends = [wiring.engine_ends for wiring in wirings]
        return self._add(
            ChildProcess.spawn(
                "engine",
                0,
                self._config,
                self._pages.names,
                ends,
                device=self._device,
                step_rows_fd=self._step_rows_fd,
                vetted_grammars_fd=self._vetted_grammars_fd,
            )
        )

    def _add(self, child: ChildProcess) -> ChildProcess:
        child.progress_at_spawn = self._pages.progress(child.place)
        self._children.add(child)
        return child

    def _expect_ready(self, child: ChildProcess) -> None:
        child.ready_by = child.spawned + self._config.launch.startup_timeout
