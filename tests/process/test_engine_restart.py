"""The death of the engine is a pause: clients get what they would have got, and learn nothing of it."""

import contextlib
import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from tests.support.poisoned_engine import POISON_ID
from tests.support.serving import START_DEADLINE_S, ServerProcess, mock_server, running_server, tiny_model, wait_until

Answer = tuple[dict[int, str], dict[int, str], dict[str, Any]]  # text and finish reason by index; usage
PROMPT = list(range(100, 140))  # two full blocks, which the prefix cache finds again


def requests(num_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """One of each kind, all of about the same length."""
    length = {"max_tokens": num_tokens, "ignore_eos": True, "stream_options": {"include_usage": True}, "stream": True}
    whole = {"max_tokens": num_tokens, "ignore_eos": True}
    word = {"regex": "([a-z]{2,9}[ ,;.])+"}
    messages = [{"role": "user", "content": "Where is the harbour?"}]
    return [
        ("completions", {"prompt": PROMPT, "temperature": 0, **length}),
        ("completions", {"prompt": PROMPT, "temperature": 1.0, "seed": 7, "n": 2, **length}),
        ("completions", {"prompt": "Hello", "temperature": 0.8, "seed": 3, "frequency_penalty": 0.7, **whole}),
        ("completions", {"prompt": "a b", "temperature": 0.9, "seed": 5, "n": 2, "min_tokens": num_tokens, **whole}),
        ("completions", {"prompt": [5, 6], "temperature": 0, "logprobs": 2, **length}),
        ("completions", {"prompt": [7], "temperature": 1.0, "seed": 2, "structured_outputs": word, **length}),
        ("chat/completions", {"messages": messages, "temperature": 0.7, "seed": 11, "top_p": 0.9, **length}),
        ("chat/completions", {"messages": messages, "temperature": 0, "repetition_penalty": 1.1, **whole}),
    ]


def ask(url: str, route: str, body: dict[str, Any], timeout_s: float = 100) -> Answer:
    """One answer, put together from its events if it is streamed."""
    request = Request(f"{url}/v1/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=timeout_s) as response:
        data = response.read().decode()
    if body.get("stream"):
        assert data.endswith("data: [DONE]\n\n")
        bodies = [json.loads(line[6:]) for line in data.split("\n") if line.startswith("data: {")]
    else:
        bodies = [json.loads(data)]
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for part in bodies:
        for choice in part["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            texts[choice["index"]] = texts.get(choice["index"], "") + (
                choice.get("text") or message.get("content") or ""
            )
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return texts, reasons, next(part["usage"] for part in bodies if part.get("usage"))


def ask_all(
    server: ServerProcess,
    asked: Sequence[tuple[str, dict[str, Any]]],
    meanwhile: Callable[[Sequence[Future[Any]]], None] = lambda _: None,
) -> Any:
    """All answers, or HTTP errors, of requests that run at once. `meanwhile` gets the pending answers."""

    def answer(route: str, body: dict[str, Any]) -> Answer | HTTPError:
        try:
            return ask(server.url, route, body)
        except HTTPError as error:
            return error

    with ThreadPoolExecutor(len(asked)) as pool:
        pending = [pool.submit(answer, *one) for one in asked]
        meanwhile(pending)
        return [one.result() for one in pending]


def metric(server: ServerProcess, name: str) -> int:
    """Sum over the labels."""
    with urlopen(f"{server.url}/metrics", timeout=30) as response:
        lines = response.read().decode().split("\n")
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"tokring:{name}(_total)?[ {{]", line)))


def num_running(server: ServerProcess) -> int:
    with urlopen(f"{server.url}/load", timeout=30) as response:
        return int(json.load(response)["running"])


def kill_engine(server: ServerProcess, number: signal.Signals = signal.SIGKILL) -> None:
    """Kills the engine and waits until another one has been started."""
    dead = server.children()["engine 0"]
    dead.send_signal(number)
    wait_until(lambda: server.children().get("engine 0", dead) != dead, "another engine starts", START_DEADLINE_S)


def kill_while_all_run(
    server: ServerProcess, num_sequences: int, numbers: Sequence[signal.Signals], pending: Sequence[Future[Any]]
) -> None:
    """Brings about the deaths in turn, unless one of the answers is complete before."""
    for number in numbers:
        wait_until(
            lambda: num_running(server) == num_sequences or any(one.done() for one in pending),
            "all requests run",
            START_DEADLINE_S,
        )
        if any(one.done() for one in pending):
            return
        kill_engine(server, number)


@contextlib.contextmanager
def poisoned_server(*arguments: str) -> Iterator[ServerProcess]:
    """A mock engine that dies of POISON_ID as a prompt's first token."""
    repository = str(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", repository, prepend=":")
        server = ServerProcess(
            ("--port", "0", "--engine", "mock", "--model", tiny_model(), *arguments),
            program="tests.support.poisoned_engine",
        )
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def check_resumed(server: ServerProcess, num_tokens: int, numbers: Sequence[signal.Signals]) -> None:
    """The same requests, undisturbed and under kills, get equal text, finish reasons and usage.

    Longer ones on a machine that is too slow to look while all of them run.
    """
    ask_all(server, requests(1))  # fills the prefix cache
    for length in (num_tokens, 4 * num_tokens, 20 * num_tokens):
        asked = requests(length)
        expected = ask_all(server, asked)
        assert expected[0][2]["prompt_tokens_details"]["cached_tokens"] == 32
        before = metric(server, "engine_restarts"), metric(server, "requests_resumed")
        answers = ask_all(server, asked, lambda pending: kill_while_all_run(server, 10, numbers, pending))
        assert answers == expected
        if metric(server, "engine_restarts") == before[0] + len(numbers):
            assert metric(server, "requests_resumed") >= before[1] + 10
            return
    raise AssertionError("the machine is too slow for the test")


def test_streams_and_whole_answers_survive_the_engine_with_equal_text_reasons_and_usage() -> None:
    with mock_server("--mock-step-ms", "3", "--engine-restarts", "3") as server:
        check_resumed(server, 300, [signal.SIGKILL, signal.SIGSEGV, signal.SIGKILL])
        # What the dead engines had vetted is not vetted again: the process for it has started once.
        assert len(re.findall(r"^\[engine 0 .* grammars are vetted by process", server.log, re.MULTILINE)) == 1
        assert re.search(r"ERROR engine 0 \(pid \d+\) was ended by SIGSEGV; another one starts now", server.log)
        # A request that comes between two engines waits for the next one.
        kill_engine(server)
        assert ask(server.url, "completions", {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True})[1] == {
            0: "length"
        }
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert server.pages() == []


def test_the_death_of_an_idle_engine_is_noticed_without_traffic_and_the_next_request_is_answered() -> None:
    with mock_server() as server:
        supervisor = psutil.Process(server.pid)
        supervisor.suspend()  # no other engine starts meanwhile
        server.children()["engine 0"].kill()
        wait_until(lambda: server.health() == 503, "the front end has noticed")
        supervisor.resume()
        body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        assert ask(server.url, "completions", body)[1] == {0: "length"}
        wait_until(lambda: server.health() == 200, "healthy again")


def test_sampled_text_of_a_real_model_is_the_same_after_a_resume() -> None:
    arguments = ("--dtype", "float32", "--engine-restarts", "3", "--max-num-batched-tokens", "64")
    with running_server("--model", tiny_model(), *arguments) as server:
        check_resumed(server, 500, [signal.SIGKILL])


def test_a_request_that_kills_the_engine_ends_with_an_error_and_takes_no_other_down() -> None:
    with poisoned_server("--mock-step-ms", "3", "--engine-restarts", "5") as server:
        asked: list[tuple[str, dict[str, Any]]] = [
            ("completions", {"prompt": [index + 1], "max_tokens": 60, "temperature": 0, "ignore_eos": True})
            for index in range(32)
        ]
        expected = [ask(server.url, *one) for one in asked]
        poison = ("completions", {"prompt": [POISON_ID, 5], "max_tokens": 60, "ignore_eos": True})
        *answers, error = ask_all(server, [*asked, poison])
        assert isinstance(error, HTTPError) and error.code == 500
        assert json.load(error)["error"]["code"] == "poison"
        assert answers == expected
        assert metric(server, "engine_restarts") <= 3


def test_any_number_of_kills_from_outside_during_one_long_prompt_is_no_poison() -> None:
    slow = ("--mock-step-ms", "10", "--max-num-batched-tokens", "16", "--max-num-seqs", "4")
    with mock_server(*slow) as server:
        body = {"prompt": [1 + index % 300 for index in range(4000)], "max_tokens": 4, "ignore_eos": True}
        pool = ThreadPoolExecutor(1)
        pending = pool.submit(ask, server.url, "completions", body)
        for _ in range(4):
            wait_until(lambda: num_running(server) == 1, "the prompt is being computed", START_DEADLINE_S)
            assert not pending.done()
            kill_engine(server)
        assert pending.result(START_DEADLINE_S)[1] == {0: "length"}


def test_an_engine_that_dies_again_and_again_without_a_step_ends_the_server() -> None:
    with poisoned_server("--engine-restarts", "1") as server:
        poison = {"prompt": [POISON_ID], "max_tokens": 5}
        [error] = ask_all(server, [("completions", poison)])
        assert isinstance(error, HTTPError) and error.code == 503
        assert json.load(error)["error"]["code"] == "engine_dead"
        assert server.wait_end() == 1
        assert re.search(r"engine 0 \(pid \d+\) was ended by SIGABRT; ending the server", server.log)
        assert server.pages() == []
