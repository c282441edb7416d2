"""What can't be started, as descriptors have run out: tried again, with nothing left behind; streams go on."""

import contextlib
import errno
import itertools
import os
import re
import resource
import selectors
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.process.test_engine_restart import ask, metric, num_running
from tests.process.test_frontend_restart import answer
from tests.process.test_lost_channel import BODY, end_channels, supervisor_descriptor
from tests.process.test_reload import reload
from tests.support.orphans import finding_orphans
from tests.support.serving import START_DEADLINE_S, ServerProcess, mock_server, tiny_model, wait_until
from tokring.config import Config, LaunchSettings
from tokring.launch.children import Children
from tokring.launch.server_log import ServerLog
from tokring.launch.spawner import Spawner
from tokring.launch.stats_pages import StatsPages

NO_MORE = r"\[Errno 24\] Too many open files"


@contextlib.contextmanager
def descriptors_up_to(limit: int, pid: int = 0) -> Iterator[None]:
    """That process keeps what it has, and gets no new one with this number or a higher one."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def wait_for_line(server: ServerProcess, pattern: str) -> None:
    wait_until(lambda: re.search(pattern, server.log), f"{pattern!r} in the log")


class Server:
    """The parts of a supervisor that start processes: one front end and one engine, which nobody listens to."""

    def __init__(self, pages: StatsPages) -> None:
        log = ServerLog(LaunchSettings())
        self.selector = selectors.DefaultSelector()
        self.children = Children(self.selector, log, lambda child, message: None, lambda child: None)
        self.spawner = Spawner(Config(), pages, (), self.children)
        self.spawner.start_all()
        self.frontend, self.engine = self.children.living()

    def what_there_is(self) -> tuple[int, int, int, int]:
        """Descriptors, those that are watched, child processes (dead ones too), and those that are known."""
        num_children = len(psutil.Process().children())
        return len(os.listdir("/proc/self/fd")), len(self.selector.get_map()), num_children, len(self.children.living())


@pytest.fixture
def parts() -> Iterator[Server]:
    with StatsPages(num_frontends=2) as pages:
        server = Server(pages)
        yield server
        server.children.kill_all()
        server.spawner.close()
        server.selector.close()


@pytest.mark.parametrize(
    "start",
    [
        lambda server: server.spawner.restart_engine(died_by_itself=True),
        lambda server: server.spawner.restart_frontend(1),
        lambda server: server.spawner.rewire(server.frontend, server.engine),
    ],
    ids=["engine", "front end", "channel"],
)
def test_a_start_that_fails_at_any_descriptor_leaves_nothing_behind(
    parts: Server, start: Callable[[Server], None]
) -> None:
    before = parts.what_there_is()
    num_failures = 0
    for limit in itertools.count(3):
        with descriptors_up_to(limit):
            try:
                start(parts)
                break
            except OSError as error:
                assert error.errno == errno.EMFILE
        num_failures += 1
        assert parts.what_there_is() == before
    assert num_failures > 6  # a channel has six


def test_what_dies_while_descriptors_are_short_is_started_once_there_are_more() -> None:
    with mock_server("--mock-step-ms", "5") as server, ThreadPoolExecutor(3) as pool:
        bodies = [{**BODY, "seed": index} for index in range(3)]
        expected = [ask(server.url, "completions", body) for body in bodies]

        answers = [pool.submit(ask, server.url, "completions", body) for body in bodies]
        wait_until(lambda: num_running(server) == 3, "all run")
        with descriptors_up_to(3, server.pid):
            server.children()["engine 0"].kill()
            wait_for_line(server, rf"engine 0 can't be started: {NO_MORE}; another one starts in 0.1 s")
        # The same text, and usage but for what is found in the cache.
        assert [one.result(START_DEADLINE_S)[:2] for one in answers] == [one[:2] for one in expected]
        assert metric(server, "engine_restarts") == 1

        answers = [pool.submit(ask, server.url, "completions", body) for body in bodies]
        wait_until(lambda: num_running(server) == 3, "all run")
        engine = server.children()["engine 0"]
        supervisor_fd = supervisor_descriptor(server, engine)
        with descriptors_up_to(3, server.pid):
            end_channels(engine, supervisor_fd)
            wait_for_line(server, rf"frontend 0 .* can't get another channel now: {NO_MORE}")
        assert [one.result(START_DEADLINE_S)[:2] for one in answers] == [one[:2] for one in expected]

        children = server.children()
        with descriptors_up_to(3, server.pid):
            assert reload(server) == 1
        wait_for_line(server, rf"reload failed: frontend 1 can't be started: {NO_MORE}")
        assert server.children() == children
        assert metric(server, "reloads_failed") == 1
        assert reload(server) == 0

        wait_until(lambda: "frontend 0" not in server.children(), "the old one has ended")
        with descriptors_up_to(3, server.pid):
            server.children()["frontend 1"].kill()
            wait_for_line(server, rf"frontend 1 can't be started: {NO_MORE}; another one starts in")
        wait_until(lambda: server.health() == 200, "healthy again", START_DEADLINE_S)
        assert answer(server)["usage"]["completion_tokens"] == 4
        assert metric(server, "frontend_restarts") == 1
        assert "Traceback" not in server.log
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert server.pages() == []


def test_after_too_many_tries_the_server_ends_with_the_cause() -> None:
    with mock_server("--engine-restarts", "2") as server:
        frontend = server.children()["frontend 0"]
        with contextlib.suppress(ProcessLookupError), descriptors_up_to(3, server.pid):
            server.children()["engine 0"].kill()
            assert server.wait_end() == 1
        assert len(re.findall(rf"engine 0 can't be started: {NO_MORE}; another one", server.log)) == 1
        assert re.search(rf"ERROR engine 0 can't be started: {NO_MORE}, again and again$", server.log, re.MULTILINE)
        assert "Traceback" not in server.log
        assert not frontend.is_running()
        assert server.pages() == []


@pytest.mark.parametrize("num_descriptors", range(10, 31, 4))
def test_a_first_start_without_enough_descriptors_is_one_line_and_leaves_nobody(num_descriptors: int) -> None:
    arguments = (str(num_descriptors), "-m", "tokring", "serve", "--port", "0", "--engine", "mock")
    with finding_orphans() as orphans:
        server = ServerProcess(
            (*arguments, "--model", tiny_model()), program="tests.support.with_few_descriptors", command="--"
        )
        try:
            assert server.wait_end() == 1
            assert re.search(rf"can't start: {NO_MORE}", server.lines[-1])
            assert "Traceback" not in server.log
            assert server.pages() == []
            wait_until(lambda: not orphans(), "nobody is left")
        finally:
            server.kill()
