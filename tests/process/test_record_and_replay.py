"""A recording of real traffic, replayed without a model, gives clients the same bytes."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from tests.support.serving import ServerProcess, mock_server, wait_until
from tokring.recording.recording import recorded_frames
from tokring_ipc import FrameType

# Of an answer, what no two runs have in common: its id, the second in which it was made, how long its stages took.
RUN_DEPENDENT = re.compile(rb'"id":"[^"]*"|"created":[0-9]+|: server-timing [^\n]*\n\n')

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "Hello", "max_tokens": 12, "stream": True}),
    ("completions", {"prompt": "Hello", "max_tokens": 12, "stream": True, "temperature": 1.0}),
    ("completions", {"prompt": "Hello", "max_tokens": 12, "stream": True, "temperature": 1.0}),
    ("completions", {"prompt": "a b", "max_tokens": 9, "stream": True, "n": 2, "seed": 7, "temperature": 0.9}),
    ("completions", {"prompt": [1, 2, 3], "max_tokens": 8, "stream": True, "logprobs": 3}),
    ("completions", {"prompt": [3, 2, 1], "max_tokens": 5, "logprobs": 1, "prompt_logprobs": 2}),
    ("completions", {"prompt": [5], "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}),
    ("completions", {"prompt": [9, 8], "max_tokens": 20, "stream": True, "stop": ["e", "a", "o", "1", "x"]}),
    ("completions", {"prompt": [4, 4], "max_tokens": 6, "logit_bias": {"7": 5.0, "9": 4.0}, "temperature": 1.0}),
]


CHOICE = re.compile(rb'"index":([0-9]+)')


def ask(url: str, route: str, body: dict[str, Any]) -> bytes:
    """The answer's bytes without what differs from run to run.

    Events are put in the order of their choices: which choice's last event comes first on a shared connection depends
    on when the front end gets to it.
    """
    data = json.dumps({"ignore_eos": True, **body}).encode()
    with urlopen(Request(f"{url}/v1/{route}", data, {"Content-Type": "application/json"}), timeout=60) as answer:
        events = RUN_DEPENDENT.sub(b"", answer.read()).split(b"\n\n")
    return b"\n\n".join(sorted(events, key=_choice_of))


def _choice_of(event: bytes) -> int:
    found = CHOICE.search(event)
    return int(found[1]) if found else 1 << 30


def ask_all(server: ServerProcess) -> list[bytes]:
    return [ask(server.url, route, body) for route, body in REQUESTS]


def ask_at_once(server: ServerProcess, count: int) -> list[bytes]:
    bodies = [{"prompt": [1 + index], "max_tokens": 30, "stream": True, "temperature": 1.0} for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda body: ask(server.url, "completions", body), bodies))


def server_load(server: ServerProcess) -> int:
    with urlopen(f"{server.url}/load", timeout=10) as answer:
        return int(json.load(answer)["server_load"])


def end(server: ServerProcess) -> None:
    server.process.terminate()
    assert server.wait_end() == 0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes], list[bytes]]:
    """(file, answers one after the other, answers at once)."""
    path = tmp_path_factory.mktemp("recording") / "traffic"
    with mock_server("--record", str(path), "--mock-step-ms", "8") as server:
        answers = ask_all(server), ask_at_once(server, 24)
        end(server)
    assert path.stat().st_mode & 0o077 == 0
    return path, *answers


@contextlib.contextmanager
def replaying(path: Path, *arguments: str) -> Iterator[ServerProcess]:
    """`tokring replay`, ready."""
    server = ServerProcess((str(path), "--port", "0", *arguments), command="replay")
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def joined(answer: bytes) -> dict[int, dict[str, Any]]:
    """By choice: all text, all logprobs, the finish reason: what stays the same where chunks are merged."""
    choices: dict[int, dict[str, Any]] = {}
    for event in answer.split(b"\n\n"):
        text = event.removeprefix(b"data: ").replace(b"{,", b"{").replace(b",,", b",")
        for part in json.loads(text)["choices"] if b'"choices"' in text else ():
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": [], "finish_reason": None})
            choice["text"] += part["text"]
            choice["logprobs"] += (part["logprobs"] or {}).get("token_logprobs", [])
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
    return choices


def test_the_same_requests_get_byte_equal_answers(recorded: tuple[Path, list[bytes], list[bytes]]) -> None:
    path, one_by_one, at_once = recorded
    with replaying(path, "--speed", "original") as server:
        assert ask_all(server) == one_by_one
        assert list(map(joined, ask_at_once(server, 24))) == list(map(joined, at_once))
        assert not any("torch" in mapping.path for mapping in server.children()["engine 0"].memory_maps())


def test_at_full_speed_they_get_the_same_text_in_perhaps_fewer_chunks(
    recorded: tuple[Path, list[bytes], list[bytes]],
) -> None:
    path, one_by_one, at_once = recorded
    assert all(choice["text"] and choice["finish_reason"] for answer in at_once for choice in joined(answer).values())
    with replaying(path, "--speed", "full") as server:
        assert list(map(joined, ask_all(server))) == list(map(joined, one_by_one))
        assert list(map(joined, ask_at_once(server, 24))) == list(map(joined, at_once))


def test_a_request_that_was_not_recorded_is_refused_and_a_client_may_leave(
    recorded: tuple[Path, list[bytes], list[bytes]],
) -> None:
    with replaying(recorded[0]) as server:
        with pytest.raises(HTTPError) as caught:
            ask(server.url, "completions", {"prompt": "never asked", "max_tokens": 3})
        caught.value.close()
        assert caught.value.code == 400
        wait_until(lambda: "not in the recording" in server.log, "the engine says why")
        assert ask(server.url, *REQUESTS[0]) == recorded[1][0]  # and the server goes on
        body = {"prompt": [1], "max_tokens": 30, "stream": True, "temperature": 1.0, "ignore_eos": True}
        request = Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urlopen(request, timeout=60).close()
        wait_until(lambda: server_load(server) == 0, "the request of the client that left is over")
        end(server)


def test_recorded_frames_are_there_for_benchmarks(recorded: tuple[Path, list[bytes], list[bytes]]) -> None:
    frames = list(recorded_frames(recorded[0]))
    times = [frame.time_ns for frame in frames]
    assert len(frames) > 100 and times == sorted(times)
    assert all(int(frame.data[:4].view(np.uint32)[0]) == len(frame.data) for frame in frames)


def test_a_recording_plays_into_the_rings_of_the_benchmark(recorded: tuple[Path, list[bytes], list[bytes]]) -> None:
    command = [sys.executable, "-m", "tokring", "bench", "replay", str(recorded[0]), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    played = json.loads(done.stdout)
    steps = [frame for frame in recorded_frames(recorded[0]) if frame.data[4] == FrameType.STEP]
    assert played["frames"] == len(steps)
    assert played["rows"] >= 24 * 30
    assert played["doorbells_sent"] + played["doorbells_suppressed"] == played["frames"]


@pytest.mark.parametrize(("content", "complaint"), [(b"", "it is empty"), (b"no recording" * 9, "not written by")])
def test_a_file_that_is_no_recording_is_one_clear_line(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    command = [sys.executable, "-m", "tokring", "replay", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert complaint in done.stderr and len(done.stderr.splitlines()) == 1
