"""A thousand requests at once against a queue of 64: each is served right, or told in time when to come back."""

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp

from tests.support.serving import mock_server

NUM_REQUESTS = 1000
QUEUE_LIMIT = 64
# A place is taken for two seconds: however slowly requests come in, they come faster than places are freed.
NUM_TOKENS, STEP_MS = 40, 50
SERVER = (
    "--max-num-seqs",
    str(QUEUE_LIMIT),
    "--max-queued",
    str(QUEUE_LIMIT),
    "--mock-step-ms",
    str(STEP_MS),
    "--disable-access-log-for-endpoints",
    "/v1/completions",
)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    retry_after: str | None
    body: str

    @property
    def text(self) -> str:
        """Of a body or a stream; asserts that it is complete."""
        if not self.body.startswith("data: "):
            [choice] = json.loads(self.body)["choices"]
            assert choice["finish_reason"] == "length"
            return str(choice["text"])
        events = [line[6:] for line in self.body.split("\n\n") if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        return "".join(choice["text"] for choice in choices)


@contextmanager
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> Answer:
    body = {
        "prompt": "Hello",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": number % 2 == 0,
    }
    async with session.post(f"{url}/v1/completions", json=body) as response:
        return Answer(response.status, response.headers.get("Retry-After"), await response.text())


async def crowd(url: str) -> tuple[Answer, list[Answer]]:
    """(One alone, then all at once.)"""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        alone = await ask(session, url, 0)
        return alone, list(await asyncio.gather(*(ask(session, url, number) for number in range(NUM_REQUESTS))))


def test_of_a_thousand_at_once_each_is_served_right_or_refused_before_the_headers() -> None:
    with many_descriptors(), mock_server(*SERVER) as server:
        alone, answers = asyncio.run(crowd(server.url))
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    assert len(served) >= 2 * QUEUE_LIMIT and refused
    assert {answer.text for answer in served} == {alone.text}
    for answer in refused:
        assert answer.status in (429, 503) and int(answer.retry_after or 0) >= 1
        assert json.loads(answer.body)["error"]["code"] == "overloaded"
