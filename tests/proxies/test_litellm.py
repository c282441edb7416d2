"""LiteLLM's proxy in front (`make test-proxies` installs it; elsewhere these tests are skipped)."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.proxies.programs import free_port, running
from tests.support.serving import mock_server

PROGRAMS = os.environ.get("TOKRING_TEST_PROXIES", "")  # a directory with the programs
LITELLM = Path(PROGRAMS) / "litellm"
CONFIG = """
model_list:
  - model_name: small
    litellm_params: {{model: openai/small, api_base: "{url}/v1", api_key: none}}
litellm_settings: {{num_retries: 0, telemetry: false}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""
START_DEADLINE_S = 300  # on two busy cores
pytestmark = [
    pytest.mark.skipif(not (PROGRAMS and LITELLM.exists()), reason="run by `make test-proxies`"),
    pytest.mark.timeout(START_DEADLINE_S + 120),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory, port = tmp_path_factory.mktemp("litellm"), free_port()
    with mock_server("--served-model-name", "small", "--max-model-len", "256") as server:
        (directory / "config.yaml").write_text(CONFIG.format(url=server.url))
        arguments = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
        with running([str(LITELLM), *arguments], port, directory, deadline_s=START_DEADLINE_S):
            yield f"http://127.0.0.1:{port}"


def chat(url: str, content: str = "hi", **fields: object) -> tuple[int, str]:
    async def ask() -> tuple[int, str]:
        body = {"model": "small", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
        timeout = aiohttp.ClientTimeout(60)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                return answer.status, await answer.text()

    return asyncio.run(ask())


def test_answers_come_through(url: str) -> None:
    status, text = chat(url)
    assert status == 200 and '"completion_tokens":4' in text


def test_streams_come_through(url: str) -> None:
    status, text = chat(url, stream=True)
    assert status == 200 and text.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in text


def test_a_prompt_over_the_context_is_known_as_such(url: str) -> None:
    status, text = chat(url, "word " * 2000)
    assert status == 400 and "ContextWindowExceededError" in text


def test_its_health_check_finds_the_server_healthy(url: str) -> None:
    async def ask() -> str:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            async with session.get(f"{url}/health") as answer:
                return await answer.text()

    assert '"unhealthy_count":0' in asyncio.run(ask())
