"""Many requests on real processes with a tiny model: nothing crosses, nothing is left, nothing grows."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest

from tests.support.serving import ServerProcess, running_server, wait_until
from tests.support.tiny_hf import write_tiny_hf

NUM_STREAMS = 64
NUM_SHORT = 1000
GROWTH_LIMIT_BYTES_PER_REQUEST = 2048  # a leaked request record alone would be more over 500 requests; noise is less


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_hf(directory)
    with running_server(str(directory), "--dtype", "float32") as running:
        yield running


def complete(url: str, prompt: list[int], **body: object) -> str:
    """The text of one streamed or whole completion; asserts that a stream ends as it must."""
    data = json.dumps({"prompt": prompt, "temperature": 0, "ignore_eos": True, **body}).encode()
    with urlopen(Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"}), timeout=120) as answer:
        if not body.get("stream"):
            return str(json.load(answer)["choices"][0]["text"])
        events = [line[6:] for line in answer.read().decode().split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


def metrics(url: str) -> dict[str, float]:
    with urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {re.sub(r"\{.*", "", name): float(value) for name, value in samples}


def descriptors(server: ServerProcess) -> dict[str, int]:
    return {name: child.num_fds() for name, child in server.children().items()}


def resident_bytes(server: ServerProcess) -> int:
    return sum(child.memory_info().rss for child in server.children().values())


def idle(url: str) -> bool:
    now = metrics(url)
    return now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0


def test_64_streams_at_once_all_end_right(server: ServerProcess) -> None:
    prompts = [[20 + i, 21 + i, 22 + i] for i in range(NUM_STREAMS)]
    alone = [complete(server.url, prompt, max_tokens=32) for prompt in prompts[:8]]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        texts = list(pool.map(lambda prompt: complete(server.url, prompt, max_tokens=32, stream=True), prompts))
    assert texts[:8] == alone
    assert all(texts)


def test_1000_short_requests_leave_nothing_behind(server: ServerProcess) -> None:
    for i in range(20):
        complete(server.url, [30, 31, i + 1], max_tokens=2)
    wait_until(lambda: idle(server.url), "nothing runs")
    before = descriptors(server)
    resident = []
    for i in range(NUM_SHORT):
        complete(server.url, [40 + i % 300, 41, 42], max_tokens=2, stream=i % 2 == 0)
        if i >= NUM_SHORT // 2:
            resident.append(resident_bytes(server))
    wait_until(lambda: idle(server.url), "nothing runs")
    wait_until(lambda: descriptors(server) == before, "every descriptor is closed")
    growth = np.polyfit(np.arange(len(resident)), resident, 1)[0]
    assert growth < GROWTH_LIMIT_BYTES_PER_REQUEST, f"{growth:.0f} bytes a request"
    assert metrics(server.url)["vllm:kv_cache_usage_perc"] == 0
    assert len(list(Path("/dev/shm").glob(f"tokring.{server.pid}.*"))) == len(server.pages())


def test_a_client_that_leaves_frees_its_slot(server: ServerProcess) -> None:
    url = server.url
    data = json.dumps({"prompt": [5, 6], "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    with urlopen(Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"}), timeout=60) as answer:
        answer.readline()
    wait_until(lambda: idle(url), "the abandoned request is aborted", 10)
