"""A whole server with the mock engine: how it starts, what it says, how it ends, and that nothing is left."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from tests.support.orphans import finding_orphans
from tests.support.serving import ServerProcess, mock_server, tiny_model, wait_until
from tokring.config import Config
from tokring.server.serving import raise_descriptor_limit

NAMES = {"frontend 0", "engine 0"}


def ask(url: str, **body: object) -> dict[str, Any]:
    """One completion."""
    data = json.dumps({"prompt": "Hello", "max_tokens": 4, "ignore_eos": True, **body}).encode()
    request = Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


def assert_nothing_left(server: ServerProcess, children: dict[str, psutil.Process]) -> None:
    assert server.pages() == []
    wait_until(lambda: not any(child.is_running() for child in children.values()), "the children are gone")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with mock_server() as running:
        yield running


def test_a_ready_server_is_healthy_and_answers(server: ServerProcess) -> None:
    assert server.health() == 200
    answer = ask(server.url)
    assert answer["usage"]["completion_tokens"] == 4


def test_the_log_names_the_address_and_a_command_that_works(server: ServerProcess) -> None:
    line = next(line for line in server.lines if line.startswith("  curl -N "))
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_process_titles_say_who_is_who(server: ServerProcess) -> None:
    assert set(server.children()) == NAMES
    assert " ".join(psutil.Process(server.pid).cmdline()).strip() == "tokring: supervisor"


def test_every_log_line_names_its_process(server: ServerProcess) -> None:
    wait_until(lambda: any(line.startswith("[frontend 0 ") for line in server.lines), "a line of the front end")
    wait_until(lambda: any(line.startswith("[engine 0 ") for line in server.lines), "a line of the engine")
    untagged = [line for line in server.lines if not line.startswith(("[supervisor ", "[frontend ", "[engine "))]
    assert untagged[:1] == ["try it:"]
    assert len(untagged) == 2


def test_the_engine_does_not_hold_the_listening_socket(server: ServerProcess) -> None:
    listening = {
        connection.laddr.port
        for connection in server.children()["engine 0"].net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == set()


def test_neither_the_front_end_nor_the_supervisor_has_torch_loaded(server: ServerProcess) -> None:
    for process in (psutil.Process(server.pid), server.children()["frontend 0"]):
        assert not any("libtorch" in mapping.path for mapping in process.memory_maps())


def test_a_second_server_on_the_same_port_fails_and_leaves_the_first_alone(server: ServerProcess) -> None:
    port = server.url.rsplit(":", 1)[1]
    second = ServerProcess(["--engine", "mock", "--port", port])
    assert second.wait_end() != 0
    assert f"port {port}" in second.log
    assert len(second.lines) == 1
    assert server.health() == 200


def test_two_servers_run_side_by_side_and_one_ends_alone(server: ServerProcess) -> None:
    bodies = [{"prompt": f"Marker {index}", "max_tokens": 8, "temperature": 0} for index in range(20)]
    expected = [ask(server.url, **body)["choices"] for body in bodies]
    assert len({choices[0]["text"] for choices in expected}) == 20
    with mock_server() as other, ThreadPoolExecutor(40) as pool:
        asked = [(url, body) for body in bodies for url in (server.url, other.url)]
        answers = pool.map(lambda one: ask(one[0], **one[1])["choices"], asked)
        assert list(answers) == [choices for choices in expected for _ in range(2)]
        other.kill()
    assert ask(server.url)["object"] == "text_completion"


@pytest.fixture
def sighup_not_ignored() -> Iterator[None]:
    """As from a terminal; a test run under nohup hands an ignored SIGHUP down, and the server leaves it so."""
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, old)


def test_a_hangup_that_was_ignored_at_the_start_stays_ignored() -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with mock_server() as server:
            server.send_signal(signal.SIGHUP)
            assert ask(server.url)["object"] == "text_completion"
            server.send_signal(signal.SIGTERM)
            assert server.wait_end() == 0
            assert "SIGHUP" not in server.log
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_everything_with_exit_code_0(number: signal.Signals, sighup_not_ignored: None) -> None:
    with mock_server() as server:
        children = server.children()
        server.send_signal(number)
        assert server.wait_end() == 0
        assert_nothing_left(server, children)


def test_sigterm_to_every_process_at_once_drains_like_one_to_the_supervisor() -> None:
    with mock_server() as server:
        children = server.children()
        for child in children.values():
            child.terminate()
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert_nothing_left(server, children)


def test_ctrl_c_reaches_the_whole_group_and_only_the_supervisor_acts() -> None:
    with mock_server() as server:
        children = server.children()
        for child in children.values():
            child.send_signal(signal.SIGINT)
        assert ask(server.url)["object"] == "text_completion"
        server.send_signal(signal.SIGINT)
        assert server.wait_end() == 0
        assert_nothing_left(server, children)


@pytest.mark.parametrize(
    ("name", "number"),
    [("frontend 0", signal.SIGKILL), ("engine 0", signal.SIGKILL), ("engine 0", signal.SIGSEGV)],
)
def test_the_death_of_a_child_ends_the_server_with_an_error_that_names_it(name: str, number: signal.Signals) -> None:
    with mock_server("--engine-restarts", "0", "--frontend-restarts", "0") as server:
        children = server.children()
        children[name].send_signal(number)
        assert server.wait_end() == 1
        assert f"{name} (pid {children[name].pid}) was ended by {number.name}" in server.log
        assert_nothing_left(server, children)


def test_children_end_with_a_killed_supervisor_and_the_next_start_sweeps_its_pages() -> None:
    with mock_server() as server:
        children = server.children()
        assert len(server.pages()) == 4
        server.send_signal(signal.SIGKILL)
        server.wait_end()
        wait_until(lambda: not any(child.is_running() for child in children.values()), "the children are gone")
        with mock_server():
            assert server.pages() == []


def test_a_stream_finishes_during_the_drain() -> None:
    with mock_server("--mock-step-ms", "10") as server, open_stream(server.url, max_tokens=100) as stream:
        assert stream.readline().startswith(b"data: ")
        server.send_signal(signal.SIGTERM)
        assert stream.read().rstrip().endswith(b"data: [DONE]")
        assert server.wait_end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_during_a_drain_new_requests_are_refused_and_a_second_signal_cuts_off_what_runs(number: signal.Signals) -> None:
    with mock_server("--mock-step-ms", "10") as server, open_stream(server.url, max_tokens=4000) as stream:
        children = server.children()
        assert stream.readline().startswith(b"data: ")
        server.send_signal(number)
        wait_until(lambda: server.health() == 503, "the drain has begun")
        with pytest.raises(HTTPError, match="503"):
            ask(server.url)
        # The first half second's are taken for echoes of the first one.
        wait_until(lambda: server.send_signal(number) or server.process.poll() is not None, "it ends")
        assert server.wait_end() == 128 + number
        assert "Traceback" not in server.log
        assert_nothing_left(server, children)


def test_a_drain_ends_at_the_shutdown_timeout() -> None:
    with (
        mock_server("--mock-step-ms", "10", "--shutdown-timeout", "0.2") as server,
        open_stream(server.url, max_tokens=4000) as stream,
    ):
        assert stream.readline().startswith(b"data: ")
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0


def open_stream(url: str, max_tokens: int) -> HTTPResponse:
    """An open streamed completion of exactly `max_tokens` tokens."""
    body = {"prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return urlopen(
        Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=60
    )


@pytest.mark.parametrize("delay_s", [0.05, 0.3, 0.8])
def test_sigterm_during_start_up_leaves_nothing(delay_s: float) -> None:
    with finding_orphans() as orphans:
        server = ServerProcess(["--engine", "mock", "--port", "0"])
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(delay_s)
            server.send_signal(signal.SIGTERM)
            assert server.wait_end(20) in (0, -signal.SIGTERM)
            assert server.pages() == []
            wait_until(lambda: not orphans(), "nobody is left")
        finally:
            server.kill()


def test_an_engine_that_stands_still_during_the_start_is_waited_for_and_health_says_so() -> None:
    """p20"""
    server = ServerProcess(["--engine", "mock", "--port", "0", "--model", tiny_model()])
    try:
        supervisor = psutil.Process(server.pid)
        started: list[psutil.Process] = []

        def engine_is_started() -> bool:
            started[:] = [child for child in supervisor.children() if "tokring.engine" in child.cmdline()]
            return bool(started)

        wait_until(engine_is_started, "the engine is started, after the front end")
        [engine] = started
        engine.suspend()
        wait_until(lambda: "frontend 0: waiting for the engine" in server.log, "the front end has done its part")
        found = re.search(r"listening on (http\S+); loading", server.log)
        assert found is not None and not server.url
        with pytest.raises(HTTPError, match="503"):
            urlopen(f"{found[1]}/health", timeout=60)
        engine.resume()
        assert ask(server.wait_ready())["usage"]["completion_tokens"] == 4
        assert server.children()["engine 0"] == engine
    finally:
        server.kill()


def test_a_broken_model_is_named_in_one_line(tmp_path: Path) -> None:
    server = ServerProcess([str(tmp_path), "--engine", "mock", "--port", "0"])
    assert server.wait_end(30) == 1
    errors = [line for line in server.lines if " ERROR " in line]
    assert len(errors) == 1
    assert str(tmp_path) in errors[0]
    assert "Traceback" not in server.log
    server.kill()


def test_a_wrong_flag_is_answered_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokring", "serve", "--max-num-seqs", "none"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--max-num-seqs" in done.stderr


def test_a_unix_socket_serves_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "tokring.sock"
    with mock_server("--uds", str(path)) as server:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
    assert not path.exists()


def test_a_log_that_nobody_reads_any_more_does_not_hold_up_the_server() -> None:
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tokring", "serve", "--engine", "mock", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=write_fd,
        stderr=write_fd,
    )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd, "r") as log:
            url = next(
                line.rsplit(" ", 1)[1].strip() for line in log if ": ready after " in line or " ready after " in line
            )
        for _ in range(3):
            assert ask(url)["object"] == "text_completion"
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)


def test_a_full_disk_under_the_log_does_not_hold_up_the_server(tmp_path: Path) -> None:
    path = tmp_path / "tokring.sock"
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokring", "serve", "--engine", "mock", "--uds", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
        )
    try:
        command = [
            "curl",
            "-s",
            "-o",
            os.devnull,
            "-w",
            "%{http_code}",
            "--unix-socket",
            str(path),
            "http://localhost/health",
        ]
        wait_until(
            lambda: subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "200", "healthy", 90
        )
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)


def test_a_home_that_does_not_exist_does_no_harm() -> None:
    with mock_server(environment={"HOME": "/nonexistent"}) as server:
        assert ask(server.url)["object"] == "text_completion"


def test_several_front_ends_share_one_port_and_one_engine() -> None:
    with mock_server("--api-server-count", "2") as server:
        children = server.children()
        assert set(children) == {"frontend 0", "frontend 1", "engine 0"}
        assert all(ask(server.url)["object"] == "text_completion" for _ in range(8))
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert_nothing_left(server, children)


def test_an_ordinary_end_warns_of_nothing() -> None:
    with mock_server() as server:
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert "is gone" not in server.log


def test_a_low_limit_of_open_files_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    for hard, warns in ((1 << 20, False), (64, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (hard, hard))
        raise_descriptor_limit(Config())
        assert ("limit of open files is 64" in caplog.text) == warns
