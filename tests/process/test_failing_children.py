"""What the supervisor says and does when a child fails: the cause in the log, exit code 1, nothing left."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.serving import ServerProcess, tiny_model, wait_until

REPOSITORY = Path(__file__).parents[2]
Start = Callable[..., ServerProcess]  # (behaviour, *arguments)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the supervisor with stand-in children whose engine behaves as told."""
    servers = []

    def start_with(behaviour: str, *arguments: str) -> ServerProcess:
        # "-P" keeps the working directory out of a child's path: the stand-ins are found by PYTHONPATH.
        monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=":")
        server = ServerProcess(
            ["--port", "0", *arguments], {"TOKRING_TEST_ENGINE": behaviour}, "tests.support.stand_in_child"
        )
        servers.append(server)
        return server

    yield start_with
    for server in servers:
        server.kill()


def test_an_uncaught_error_is_shown_with_its_traceback(start: Start) -> None:
    server = start("raise")
    assert server.wait_end() == 1
    cause = r"\(ArithmeticError: the sum does not add up\)"
    assert re.search(rf"ERROR engine 0 \(pid \d+\) exited with code 1 {cause}; ending the server", server.log)
    assert "Traceback (most recent call last):" in server.log
    assert "ArithmeticError: the sum does not add up" in server.log
    assert server.pages() == []


def test_an_error_meant_for_the_user_is_one_line(start: Start) -> None:
    server = start("refuse")
    assert server.wait_end() == 1
    assert [line.partition(" ERROR ")[2] for line in server.lines if " ERROR " in line] == ["model.gguf: not a model"]
    assert "Traceback" not in server.log


def test_a_silent_exit_is_shown_with_its_code_and_last_words(start: Start) -> None:
    server = start("exit")
    assert server.wait_end() == 1
    assert re.search(r"engine 0 \(pid \d+\) exited with code 7", server.log)
    assert any(line.endswith("]     my last words") for line in server.lines)


def test_what_a_killed_one_said_before_is_not_taken_for_the_cause(start: Start) -> None:
    server = start("killed")
    assert server.wait_end() == 1
    assert re.search(r"engine 0 \(pid \d+\) was ended by SIGKILL", server.log)
    assert server.log.count("what I say every day") == 1 and "last words" not in server.log


def test_a_child_that_never_gets_ready_meets_the_deadline_and_is_killed(start: Start) -> None:
    server = start("hang", "--startup-timeout", "4")
    assert server.wait_end() == 1
    assert re.search(r"--startup-timeout 4 s: engine 0 \(pid \d+\) is still (starting|loading weights)", server.log)
    assert re.search(r"engine 0 \(pid \d+\) did not end in time: killed", server.log)


def test_a_child_that_does_not_end_is_killed_and_a_drain_still_ends_with_0(start: Start) -> None:
    server = start("ignore")
    wait_until(lambda: server.url, "ready")
    server.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    assert re.search(r"engine 0 \(pid \d+\) did not end in time: killed", server.log)
    assert server.pages() == []


def test_both_output_streams_of_a_child_arrive_with_its_name_and_pid(start: Start) -> None:
    server = start("")
    wait_until(lambda: server.url, "ready")
    assert any(re.fullmatch(r"\[engine 0 \d+\] I am engine 0", line) for line in server.lines)
    assert any(re.fullmatch(r"\[frontend 0 \d+\] I am frontend 0", line) for line in server.lines)


def test_a_chat_template_that_does_not_compile_is_one_line() -> None:
    server = ServerProcess(["--port", "0", "--engine", "mock", "--model", tiny_model(), "--chat-template", "{% if"])
    try:
        assert server.wait_end() == 1
        assert "ERROR The chat template does not compile: " in server.log
        assert "Traceback" not in server.log
    finally:
        server.kill()
