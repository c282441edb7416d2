"""The supervisor's parts on their own: what they do when several things happen at once."""

import asyncio
import contextlib
import errno
import math
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest

from tokring.config import Config, LaunchSettings
from tokring.launch.child import ChannelEnds, SupervisorLink
from tokring.launch.child_process import ChildProcess, Role
from tokring.launch.children import Children, call_ready
from tokring.launch.reload import Reload
from tokring.launch.restarts import STEADY_S, Restarts
from tokring.launch.server_log import ServerLog
from tokring.launch.service_manager import ServiceManager
from tokring.launch.spawner import Spawner
from tokring.launch.stats_pages import StatsPages
from tokring.server.front_end import FrontEnd
from tokring.server.reconnection import EngineConnection
from tokring_ipc import ProcessPhase


class FakeSpawner:
    """Notes which front ends a reload asks for, and starts something else in their place."""

    def __init__(self, add: Callable[[Role, int], ChildProcess]) -> None:
        self._add = add
        self.indexes: list[int] = []
        self.most = 100  # can be started

    def add_frontend(self, index: int) -> ChildProcess:
        if len(self.indexes) == self.most:
            raise OSError(errno.EAGAIN, "no more processes")
        self.indexes.append(index)
        return self._add("frontend", index)

    restart_frontend = add_frontend


class Server:
    """The parts of a supervisor, without the loop that calls them."""

    def __init__(self, pages: StatsPages, num_frontends: int = 1) -> None:
        log = ServerLog(LaunchSettings())
        self.pages = pages
        self.selector = selectors.DefaultSelector()
        self.children = Children(self.selector, log, lambda child, message: None, lambda child: None)
        self.spawner = FakeSpawner(self.add)
        self.links: dict[int, int] = {}  # pid -> descriptor of the process's end
        spawner = cast(Spawner, self.spawner)
        self.restarts = Restarts(Config(), pages, spawner, log)
        self.reload = Reload(num_frontends, self.children, spawner, self.restarts, pages, log, ServiceManager({}))

    def add(self, role: Role, index: int) -> ChildProcess:
        """A process that waits until it is killed."""
        link, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.setblocking(False)
        process = subprocess.Popen(["sleep", "infinity"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.links[process.pid] = other_end.detach()
        child = ChildProcess(role, index, process, link)
        self.children.add(child)
        return child

    def end(self) -> None:
        self.children.kill_all()
        self.restarts.close()
        self.selector.close()
        for fd in self.links.values():
            os.close(fd)


@pytest.fixture
def server() -> Iterator[Server]:
    with StatsPages(num_frontends=2) as pages:
        server = Server(pages)
        yield server
        server.end()


def test_an_event_of_a_descriptor_whose_number_has_a_new_owner_is_not_delivered() -> None:
    selector = selectors.DefaultSelector()
    pipes = [os.pipe() for _ in range(3)]
    called: list[int] = []

    def give_away(mine: int, others: int) -> None:
        """What the end of one process may do to descriptors whose events have arrived in the same moment."""
        called.append(mine)
        selector.unregister(others)
        os.dup2(pipes[2][0], others)
        selector.register(others, selectors.EVENT_READ, partial(called.append, -1))

    (first, _), (second, _), _ = pipes
    selector.register(first, selectors.EVENT_READ, partial(give_away, first, second))
    selector.register(second, selectors.EVENT_READ, partial(give_away, second, first))
    for _, write_fd in pipes[:2]:
        os.write(write_fd, b"x")
    call_ready(selector, 0.0)
    assert len(called) == 1 and called[0] in (first, second)
    selector.close()
    for pipe in pipes:
        for fd in pipe:
            os.close(fd)


def test_a_process_that_closes_its_link_and_lives_on_does_not_wake_the_loop_without_end(server: Server) -> None:
    child = server.add("frontend", 0)
    os.close(server.links.pop(child.pid))
    assert server.selector.select(0.0), "the end of the link is told"
    call_ready(server.selector, 0.0)
    assert not server.selector.select(0.0)
    assert child in server.children.living()


def test_the_time_a_process_took_to_load_does_not_make_its_early_death_a_steady_ones(server: Server) -> None:
    engine = server.add("engine", 0)
    engine.is_ready, engine.exit_code = True, -6
    engine.spawned = time.monotonic() - 10 * STEADY_S
    engine.ready_since = time.monotonic()
    assert server.restarts.plan(engine)
    assert server.restarts.planned()["engine", 0] > time.monotonic(), "no back-off"
    engine.ready_since = time.monotonic() - STEADY_S
    assert server.restarts.plan(engine)
    assert server.restarts.planned()["engine", 0] <= time.monotonic()


@pytest.mark.parametrize(("old", "new"), [(0, 1), (1, 0)])
def test_a_reload_while_the_engine_is_about_to_restart_takes_the_indexes_that_are_free(
    server: Server, old: int, new: int
) -> None:
    server.add("frontend", old)
    engine = server.add("engine", 0)
    engine.exit_code = -9
    assert server.restarts.plan(engine)
    server.reload.begin("test")
    assert server.spawner.indexes == [new]


def test_a_reload_that_cannot_start_all_new_front_ends_fails_and_those_that_have_started_retire() -> None:
    with StatsPages(num_frontends=4) as pages:
        server = Server(pages, num_frontends=2)
        old = [server.add("frontend", index) for index in (0, 1)]
        server.spawner.most = 1
        server.reload.begin("test")
        [newcomer] = [child for child in server.children.living() if child not in old]
        assert newcomer.index == 2 and newcomer.is_retiring
        assert not any(child.is_retiring for child in old)
        assert pages.supervisor.get("reloads_failed") == 1
        newcomer.exit_code = 0
        server.reload.on_exit(newcomer)
        newcomer.is_ready = True
        server.reload.end_when_ready()  # nothing is left of it
        assert pages.supervisor.get("reloads_failed") == 1 and pages.supervisor.get("reloads") == 0
        server.end()


def test_a_front_end_that_dies_during_a_reload_is_not_shown_as_starting_for_ever(server: Server) -> None:
    old = server.add("frontend", 0)
    server.reload.begin("test")
    old.exit_code = -9
    assert server.restarts.plan(old)
    [newcomer] = [child for child in server.children.living() if child is not old]
    newcomer.is_ready = True
    server.reload.end_when_ready()
    assert not server.restarts.planned()
    assert server.pages.of(("frontend", 0)).get("phase") == ProcessPhase.STOPPED


def test_what_cannot_be_started_is_tried_again_later_and_not_without_end(server: Server) -> None:
    frontend = server.add("frontend", 0)
    frontend.exit_code = -9
    assert server.restarts.plan(frontend)
    server.spawner.most = 0
    dues = []
    while (cause := server.restarts.start_due(math.inf)) is None:
        dues.append(server.restarts.planned()["frontend", 0])
    assert cause == "frontend 0 can't be started: [Errno 11] no more processes"
    assert not server.restarts.planned()
    assert len(dues) == Config().launch.frontend_restarts - 1  # its death was the first
    assert dues == sorted(dues) and dues[-1] - time.monotonic() > 5


def test_a_front_end_that_reads_nothing_for_so_long_that_it_cannot_be_told_of_a_channel_is_killed(
    server: Server,
) -> None:
    frontend = server.add("frontend", 0)
    frontend.send_channel((), engine_died_by_itself=False)
    assert not frontend.was_killed
    with pytest.raises(BlockingIOError):
        while True:
            frontend.link.send(b"{}")
    frontend.send_channel((), engine_died_by_itself=False)
    assert frontend.was_killed


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, kind: str, **content: Any) -> bool:
        self.sent.append({"type": kind, **content})
        return True

    def keep_fds(self, num_spare: int) -> None:
        pass

    def lending_fds(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class NotLoaded:
    """A front end whose model is still being loaded."""

    has_model = False


def test_a_channel_that_has_been_replaced_is_not_reported_as_lost_under_its_successors_number() -> None:
    async def lose_twice() -> list[dict[str, Any]]:
        link = FakeLink()
        ends = ChannelEnds(frontend=0, engine=0, control_fd=-1, req_doorbell_fd=-1, out_doorbell_fd=-1)
        connection = EngineConnection(cast(FrontEnd, NotLoaded()), ends, cast(SupervisorLink, link))
        connection._next_ends = None  # in use
        connection.lost(can_reconnect=True)
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
        connection.replace({"fds": fds, "number": 1})
        connection.lost(can_reconnect=True)
        for fd in fds:
            os.close(fd)
        return link.sent

    assert asyncio.run(lose_twice()) == [{"type": "channel_lost", "number": 0, "can_reconnect": True}]
