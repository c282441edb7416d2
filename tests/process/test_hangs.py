"""A process that hangs is told from one that idles, shown in the log, killed, and followed by another."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.process.test_engine_restart import ask, metric, num_running
from tests.process.test_frontend_restart import answer, stopped
from tests.support.poisoned_engine import POISON_ID
from tests.support.serving import START_DEADLINE_S, ServerProcess, mock_server, tiny_model, wait_until
from tokring.launch.hang_watch import HangWatch, describe_threads
from tokring_ipc import Heartbeat, Role, StatsPage, page_name, server_prefix

LENGTH: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.8, "seed": 3}


def test_a_stopped_engine_is_unhealthy_then_killed_and_its_streams_go_on() -> None:
    with mock_server("--mock-step-ms", "5", "--step-timeout", "4") as server, ThreadPoolExecutor(2) as pool:
        bodies = [{"prompt": [9, index], "stream": index == 0, **LENGTH} for index in range(2)]
        bodies[0]["stream_options"] = {"include_usage": True}
        expected = [ask(server.url, "completions", body) for body in bodies]
        answers = [pool.submit(ask, server.url, "completions", body) for body in bodies]
        wait_until(lambda: num_running(server) == 2, "both run")
        engine = server.children()["engine 0"]
        engine.suspend()
        wait_until(lambda: server.health() == 503, "/health tells of the hang")
        with urlopen(f"{server.url}/metrics", timeout=30) as response:
            assert response.status == 200
        assert [one.result(START_DEADLINE_S) for one in answers] == expected
        assert metric(server, "hung_processes") >= 1
        assert re.search(rf"engine 0 \(pid {engine.pid}\) has given no sign of life for \d+ s .*killed", server.log)
        assert f"engine 0: thread {engine.pid} (" in server.log
        assert "is stopped (SIGSTOP)" in server.log
        wait_until(lambda: server.health() == 200, "healthy again", START_DEADLINE_S)
        # The same for a front end: it cannot answer meanwhile.
        frontend = server.children()["frontend 0"]
        frontend.suspend()
        wait_until(lambda: server.children().get("frontend 0", frontend) != frontend, "another one has started", 90)
        assert answer(server)["usage"]["completion_tokens"] == 4
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0


def test_an_engine_that_stood_still_for_less_than_the_deadline_goes_on_with_what_ran_and_what_came_meanwhile() -> None:
    """p06"""
    with mock_server("--mock-step-ms", "5") as server, ThreadPoolExecutor(52) as pool:
        children = server.children()
        bodies = [{"prompt": [9, index], **LENGTH, "max_tokens": 300 if index < 2 else 8} for index in range(52)]
        expected = [ask(server.url, "completions", body) for body in bodies]
        answers = [pool.submit(ask, server.url, "completions", body) for body in bodies[:2]]
        wait_until(lambda: num_running(server) == 2, "both run")
        with stopped(children["engine 0"]):
            answers += [pool.submit(ask, server.url, "completions", body) for body in bodies[2:]]
            wait_until(lambda: server.health() == 503, "/health tells of the hang")
            assert not any(one.done() for one in answers)
        assert [one.result(START_DEADLINE_S) for one in answers] == expected
        wait_until(lambda: server.health() == 200, "healthy again")
        assert server.children() == children
        assert metric(server, "hung_processes") == metric(server, "engine_restarts") == 0


def test_a_step_that_does_not_end_is_shown_with_its_stack_and_ends_as_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    monkeypatch.setenv("TOKRING_TEST_POISON", "hang")
    server = ServerProcess(
        ("--port", "0", "--engine", "mock", "--model", tiny_model(), "--step-timeout", "3"),
        program="tests.support.poisoned_engine",
    )
    try:
        server.wait_ready()
        with pytest.raises(OSError, match="500"):
            ask(server.url, "completions", {"prompt": [POISON_ID], "max_tokens": 5})
        assert re.search(r"engine 0 \(pid \d+\) has been in one step for \d+ s", server.log)
        assert 'poisoned_engine.py", line ' in server.log  # faulthandler's
        assert metric(server, "hung_processes") >= 3
        assert answer(server)["usage"]["completion_tokens"] == 4
    finally:
        server.kill()


def test_a_watch_that_was_stopped_itself_counts_no_silence() -> None:
    prefix = server_prefix()
    with (
        StatsPage.create(page_name(prefix, Role.SUPERVISOR, 0), Role.SUPERVISOR) as own,
        StatsPage.create(page_name(prefix, Role.ENGINE, 0), Role.ENGINE) as other,
    ):
        try:
            other.set("step_started_ns", 1)
            with Heartbeat(other):
                with HangWatch(own, 1.5) as watch:
                    watch.add(("engine", 0), other)
                    wait_until(lambda: watch.why_hung(("engine", 0)), "the step is too old")
                # No more ticks of its own: however long that lasts, the other one's step gets no older.
                told, ticks = watch.why_hung(("engine", 0)), other.get("heartbeat_ticks")
                wait_until(lambda: other.get("heartbeat_ticks") >= ticks + 2, "the other one beats on")
                assert watch.why_hung(("engine", 0)) == told
        finally:
            own.unlink()
            other.unlink()


def test_threads_are_described_by_name_and_state() -> None:
    lines = describe_threads(os.getpid())
    assert any(line.startswith(f"thread {os.getpid()} (") for line in lines)
    assert describe_threads(2**22 + 1) == []
