"""Pause, resume and the prefix cache's reset, asked for over HTTP, reach the one engine of all front ends."""

import json
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

from tests.process.test_engine_restart import PROMPT, ask, kill_engine, metric, num_running
from tests.process.test_start_and_stop import open_stream
from tests.support.serving import START_DEADLINE_S, ServerProcess, mock_server, wait_until
from tokring_ipc import StatsPage

STEP_TIMEOUT_S = 3
LENGTH: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.8, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}


def post(server: ServerProcess, path: str) -> Any:
    with urlopen(Request(f"{server.url}{path}", b"", method="POST"), timeout=30) as response:
        return json.load(response)


def get(server: ServerProcess, path: str) -> Any:
    with urlopen(f"{server.url}{path}", timeout=30) as response:
        return json.load(response)


def num_cached(server: ServerProcess, prompt: list[int]) -> int:
    usage = ask(server.url, "completions", {"prompt": prompt, "max_tokens": 1})[2]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_pause_holds_every_front_ends_requests_and_is_no_hang() -> None:
    arguments = ("--mock-step-ms", "5", "--step-timeout", str(STEP_TIMEOUT_S), "--shutdown-timeout", "1")
    with (
        mock_server("--admin-routes", "--api-server-count", "2", *arguments) as server,
        StatsPage.attach(next(f"/{page.name}" for page in server.pages() if "supervisor" in page.name)) as watcher,
        ThreadPoolExecutor(8) as pool,
    ):
        bodies = [{"prompt": [*PROMPT, index], "seed": index, **LENGTH, **USAGE} for index in range(6)]

        def begin(some: list[dict[str, Any]]) -> list[Future[Any]]:
            return [pool.submit(ask, server.url, "completions", body) for body in some]

        expected = [answer.result(START_DEADLINE_S)[:2] for answer in begin(bodies)]

        # The cache is emptied beside running requests, which go on.
        assert num_cached(server, PROMPT) == 32
        answers = begin(bodies[:4])
        wait_until(lambda: num_running(server) == 4, "four run")
        assert post(server, "/reset_prefix_cache") == {"status": "reset"}
        assert num_cached(server, PROMPT) == 0

        # A pause, for longer than a step may take; two more requests come meanwhile.
        assert post(server, "/pause") == {"status": "paused"}
        engine = server.children()["engine 0"]
        answers += begin(bodies[4:])
        wait_until(lambda: get(server, "/load")["waiting"] == 2, "the new ones wait")
        num_steps, num_ticks = metric(server, "engine_step_seconds_count"), watcher.get("heartbeat_ticks")
        wait_until(lambda: watcher.get("heartbeat_ticks") > num_ticks + STEP_TIMEOUT_S + 1, "a hang would be found")
        assert metric(server, "engine_step_seconds_count") == num_steps
        assert [get(server, "/is_paused")["is_paused"] for _ in range(8)] == [True] * 8  # whichever front end is asked
        assert [server.health() for _ in range(8)] == [200] * 8
        assert (metric(server, "paused"), metric(server, "hung_processes")) == (1, 0)
        assert server.children()["engine 0"] == engine
        assert not any(answer.done() for answer in answers)
        assert post(server, "/resume") == {"status": "resumed"}
        assert [answer.result(START_DEADLINE_S)[:2] for answer in answers] == expected
        assert get(server, "/is_paused") == {"is_paused": False}

        # A pause ends with its engine: the next one goes on with what it finds.
        answers = begin(bodies)
        wait_until(lambda: num_running(server) == 6, "all run")
        post(server, "/pause")
        kill_engine(server)
        assert [answer.result(START_DEADLINE_S)[:2] for answer in answers] == expected
        assert get(server, "/is_paused") == {"is_paused": False}

        # A drain does not wait for a resume.
        with open_stream(server.url, max_tokens=4000) as stream:
            assert stream.readline().startswith(b"data: ")
            post(server, "/pause")
            server.send_signal(signal.SIGTERM)
            events = stream.read().split(b"\n\n")
        assert b"shutting_down" in events[-3] and events[-2] == b"data: [DONE]"
        assert server.wait_end() == 0
