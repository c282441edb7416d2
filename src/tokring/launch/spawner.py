"""Spawner: starts the processes of one server, wired to each other."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence

from tokring import step_rows, vetted_grammars
from tokring.config import Config, Device
from tokring.launch.channel_wiring import ChannelWiring, fds_of
from tokring.launch.child_process import ChildProcess
from tokring.launch.children import Children
from tokring.launch.stats_pages import StatsPages


class Spawner:
    """Use on the main thread only: children die with the thread that started them. Close at the end.

    What starts a process or makes a channel raises OSError if there are no descriptors, processes or memory for it;
    then all is as before, so that it can be tried again.
    """

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
        """Starts the front ends, so that the port answers at once, and the engine. After an OSError some may live."""
        with new_wirings(range(self._config.server.api_server_count)) as wirings:
            for wiring in wirings:
                self._spawn_frontend(wiring, listens_at_once=True)
            self._spawn_engine(wirings)

    def restart_engine(self, *, died_by_itself: bool) -> None:
        """A new engine on new channels; each front end gets its ends, and what the dead engine was computing."""
        front_ends = self._children.living("frontend")
        old_rows_fd = self._step_rows_fd
        with new_wirings(child.index for child in front_ends) as wirings:
            self._expect_ready(self._spawn_engine(wirings))
            self._pages.supervisor.add("engine_restarts")
            for child, wiring in zip(front_ends, wirings, strict=True):
                fds = (*fds_of(wiring.frontend_ends), old_rows_fd)
                child.send_channel(fds, engine_died_by_itself=died_by_itself)
        os.close(old_rows_fd)

    def restart_frontend(self, index: int) -> None:
        self.add_frontend(index)
        self._pages.supervisor.add("frontend_restarts")

    def add_frontend(self, index: int) -> ChildProcess:
        """A new front end on the same sockets; the engine gets its end of their channel. If there is no engine now,
        the next one's follows."""
        with new_wirings([index]) as [wiring]:
            child = self._spawn_frontend(wiring, listens_at_once=False)
            self._expect_ready(child)
            for engine in self._children.living("engine"):
                engine.send_fds(fds_of(wiring.engine_ends), "channel", frontend=index)
            return child

    def rewire(self, frontend: ChildProcess, engine: ChildProcess) -> None:
        """Another channel for two processes that live."""
        with new_wirings([frontend.index]) as [wiring]:
            engine.send_fds(fds_of(wiring.engine_ends), "channel", frontend=frontend.index)
            frontend.send_channel(fds_of(wiring.frontend_ends), engine_died_by_itself=False)

    def settle_device(self, device: Device) -> None:
        """What the engine has chosen to compute on: those after it must not choose another."""
        self._device = device

    def close(self) -> None:
        for fd in (self._vetted_grammars_fd, self._step_rows_fd):
            if fd >= 0:
                os.close(fd)

    def _spawn_frontend(self, wiring: ChannelWiring, *, listens_at_once: bool) -> ChildProcess:
        index, ends = wiring.frontend_ends.frontend, [wiring.frontend_ends]
        return self._add(
            ChildProcess.spawn(
                "frontend", index, self._config, self._pages.names, ends, self._listen_fds, listens_at_once
            )
        )

    def _spawn_engine(self, wirings: Sequence[ChannelWiring]) -> ChildProcess:
        rows_fd = step_rows.create(self._config.engine.max_num_seqs)
        try:
            engine = self._add(
                ChildProcess.spawn(
                    "engine",
                    0,
                    self._config,
                    self._pages.names,
                    [wiring.engine_ends for wiring in wirings],
                    device=self._device,
                    step_rows_fd=rows_fd,
                    vetted_grammars_fd=self._vetted_grammars_fd,
                )
            )
        except OSError:
            os.close(rows_fd)
            raise
        self._step_rows_fd = rows_fd
        return engine

    def _add(self, child: ChildProcess) -> ChildProcess:
        child.progress_at_spawn = self._pages.progress(child.place)
        self._children.add(child)
        return child

    def _expect_ready(self, child: ChildProcess) -> None:
        child.ready_by = child.spawned + self._config.launch.startup_timeout


@contextlib.contextmanager
def new_wirings(frontends: Iterable[int]) -> Iterator[list[ChannelWiring]]:
    """A channel of each of these front ends with the engine; at the end only those have it who were given it."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(ChannelWiring.create(index, 0))) for index in frontends]
