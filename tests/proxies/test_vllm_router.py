"""The vllm-router wheel in front of two servers (`make test-proxies` installs it; elsewhere this is skipped)."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.proxies.programs import free_port, running
from tests.support.serving import mock_server

ROUTER = Path(os.environ.get("TOKRING_TEST_PROXIES", "/nowhere")) / "vllm-router"
pytestmark = pytest.mark.skipif(not ROUTER.exists(), reason="run by `make test-proxies`")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """(URL of the router, URLs of the servers behind it)."""
    directory, port, metrics_port = tmp_path_factory.mktemp("router"), free_port(), free_port()
    with mock_server("--served-model-name", "small") as one, mock_server("--served-model-name", "small") as two:
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
        arguments += ["--policy", "round_robin", "--worker-urls", one.url, two.url]
        with running([str(ROUTER), *arguments], port, directory, deadline_s=90):
            yield f"http://127.0.0.1:{port}", [one.url, two.url]


def test_requests_and_streams_reach_both_servers(router: tuple[str, list[str]]) -> None:
    url, servers = router

    async def run() -> None:
        body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            for number in range(6):
                fields = {**body, "stream": number % 2 == 0}
                async with session.post(f"{url}/v1/chat/completions", json=fields) as answer:
                    text = await answer.text()
                    assert answer.status == 200 and '"finish_reason":"length"' in text, text
                    assert text.rstrip().endswith("data: [DONE]") == fields["stream"]
            for server in servers:
                async with session.get(f"{server}/metrics") as answer:
                    lines = (await answer.text()).split("\n")
                    [count] = [line for line in lines if "request_success_total" in line and '"length"' in line]
                    assert int(count.rpartition(" ")[2]) > 0

    asyncio.run(run())
