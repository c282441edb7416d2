"""Many clients at once: those that never read, and more than there is room for."""

import asyncio
import socket

import pytest
from tests.server.harness import MODEL, Harness, running_server, served
from tests.server.test_http import request_bytes

from tokring.server.token_path.interface import DEFAULT_MAX_BACKLOG_BYTES

NUM_CLIENTS = 64


async def open_deaf_client(port: int, request: bytes) -> socket.socket:
    """A client that sends its request and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, request)
    return client


def test_clients_that_never_read_cost_the_others_nothing_and_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokring.server.listening.SEND_BUFFER_BYTES", 4096)

    async def run() -> None:
        async with asyncio.timeout(60), running_server(max_in_flight=2 * NUM_CLIENTS) as harness:
            await _deaf_beside_readers(harness)

    asyncio.run(run())


async def _deaf_beside_readers(harness: Harness) -> None:
    body = b'{"prompt":"hello","max_tokens":100,"temperature":0,"stream":true,"logprobs":20}'
    port = int(harness.url.rpartition(":")[2])
    deaf = [await open_deaf_client(port, request_bytes("/v1/completions", body)) for _ in range(NUM_CLIENTS)]
    await harness.until(lambda: harness.client.in_flight == NUM_CLIENTS)
    answers = await asyncio.gather(*(harness.complete(max_tokens=20, stream=True) for _ in range(NUM_CLIENTS)))
    assert len({answer.text for answer in answers}) == 1
    assert all(answer.finish_reasons == ["length"] for answer in answers)
    await harness.until(lambda: not harness.engine.requests)
    path = harness.client.token_path
    backlogs = [path.backlog(connection) for connection in harness.client.connections]
    assert len(backlogs) == NUM_CLIENTS and min(backlogs) > 0 and max(backlogs) <= DEFAULT_MAX_BACKLOG_BYTES
    for client in deaf:
        client.close()
    await harness.all_slots_are_free()
    assert harness.client.connections == {}


@served(max_in_flight=16)
async def test_of_a_crowd_each_is_served_right_or_told_when_to_come_back(harness: Harness) -> None:
    expected = (await harness.complete(max_tokens=5)).text
    harness.engine.hold()  # however slowly they come, places are taken until one was refused
    requests = [harness.complete(max_tokens=5, stream=number % 2 == 0, model=MODEL) for number in range(300)]
    asked = [asyncio.ensure_future(request) for request in requests]
    await harness.until(lambda: any(task.done() for task in asked))
    harness.engine.go_on()
    answers = await asyncio.gather(*asked)
    served_right = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    assert len(served_right) >= 16 and refused
    assert all(answer.text == expected and answer.finish_reasons == ["length"] for answer in served_right)
    for answer in refused:
        assert answer.status == 503 and answer.error["code"] == "overloaded"
        assert int(answer.headers["Retry-After"]) >= 1
    await harness.all_slots_are_free()
