"""The death of a front end ends its own connections and nothing else: another one takes its place on the same port."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.request import Request, urlopen

import psutil

from tests.process.test_engine_restart import metric, num_running
from tests.support.serving import START_DEADLINE_S, ServerProcess, mock_server, wait_until

PROMPT = list(range(100, 140))  # two full blocks, which the prefix cache finds again


def post(url: str, timeout_s: float = 100, **body: Any) -> HTTPResponse:
    data = json.dumps({"prompt": PROMPT, "temperature": 0, "ignore_eos": True, **body}).encode()
    request = Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    response: HTTPResponse = urlopen(request, timeout=timeout_s)
    return response


def answer(server: ServerProcess, num_tokens: int = 4) -> dict[str, Any]:
    with post(server.url, max_tokens=num_tokens) as response:
        result: dict[str, Any] = json.load(response)
    return result


def text_of(data: bytes) -> str:
    """Of a whole stream."""
    assert data.endswith(b"data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the process is stopped")
    try:
        yield
    finally:
        process.resume()


def kill(server: ServerProcess, name: str) -> psutil.Process:
    """Returns the process that takes its place."""
    dead = server.children()[name]
    dead.kill()
    seen = dead

    def is_replaced() -> bool:
        nonlocal seen
        seen = server.children().get(name, dead)
        return seen != dead

    wait_until(is_replaced, "another one has started", START_DEADLINE_S)
    return seen


def test_one_front_end_dies_and_the_others_streams_and_the_cache_go_on() -> None:
    with mock_server("--mock-step-ms", "5", "--api-server-count", "2") as server:
        children = server.children()
        expected = answer(server, 400)["choices"][0]["text"]
        with stopped(children["frontend 1"]):
            lost = post(server.url, stream=True, max_tokens=8000)
        with stopped(children["frontend 0"]):
            kept = post(server.url, stream=True, max_tokens=400)
        wait_until(lambda: num_running(server) == 2, "both run")
        kill(server, "frontend 0")
        try:
            is_whole = lost.read().endswith(b"data: [DONE]\n\n")
        except (HTTPException, OSError):
            is_whole = False
        assert not is_whole
        assert text_of(kept.read()) == expected
        # Long before its 8,000 tokens: the engine has ended what nobody waits for.
        wait_until(lambda: num_running(server) == 0, "the dead front end's request has ended")
        wait_until(lambda: "frontend 0 is ready after" in server.log, "the other one is ready", START_DEADLINE_S)
        with stopped(children["frontend 1"]):
            assert answer(server)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert metric(server, "frontend_restarts") == 1
        assert server.children()["engine 0"] == children["engine 0"]
        assert server.health() == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert server.pages() == []


def test_no_connection_is_refused_while_the_only_front_end_is_replaced_and_a_drain_meanwhile_ends_with_0() -> None:
    with mock_server() as server:
        for _ in range(2):
            server.children()["frontend 0"].kill()
            assert answer(server)["usage"]["completion_tokens"] == 4
        assert server.health() == 200
        kill(server, "frontend 0")
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert server.pages() == []


def test_front_end_and_engine_die_at_the_same_moment_and_both_come_back() -> None:
    with mock_server() as server:
        for order in (("frontend 0", "engine 0"), ("engine 0", "frontend 0")):
            children = server.children()
            for name in order:
                children[name].kill()
            assert answer(server)["usage"]["completion_tokens"] == 4
        # A front end that is loading when the engine dies finds the next one.
        kill(server, "frontend 0")
        kill(server, "engine 0")
        assert answer(server)["usage"]["completion_tokens"] == 4
        assert metric(server, "engine_restarts") == 3


def test_without_front_end_restarts_its_death_ends_the_server() -> None:
    with mock_server("--frontend-restarts", "0") as server:
        pid = server.children()["frontend 0"].pid
        server.children()["frontend 0"].kill()
        assert server.wait_end() == 1
        assert f"frontend 0 (pid {pid}) was ended by SIGKILL; ending the server" in server.log
        assert server.pages() == []
