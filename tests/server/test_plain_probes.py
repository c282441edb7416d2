"""Probes that are answered in front of aiohttp: only the plainest are, and nobody can tell by the answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.server.harness import Harness, served

from tokring.server.front_end import Phase
from tokring.server.http_connection import HttpConnection
from tokring.server.plain_probes import PlainProbes, plain_probe
from tokring.server.state_probes import STATE_PROBES

PLAIN = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
KEPT_BY_AIOHTTP = b"X-Request-Id: mine\r\n"


class Connection:
    """One kept connection, literal bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, *parts: bytes) -> tuple[bytes, dict[str, str], bytes]:
        """(status line, headers, body)."""
        for part in parts:
            self.writer.write(part)
            await asyncio.sleep(0)
        head = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = head[:-4].decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return status.encode(), headers, await self.reader.readexactly(int(headers["Content-Length"]))


@asynccontextmanager
async def connected(harness: Harness) -> AsyncIterator[Connection]:
    host, port = harness.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("path", [*STATE_PROBES, "/metrics"])
def test_a_request_with_nothing_special_is_plain(path: str) -> None:
    head = f"GET {path} HTTP/1.1\r\n".encode()
    assert plain_probe(head + b"Host: x\r\n\r\n") == path
    assert plain_probe(head + b"host:a.example:80\r\nUser-Agent: kube-probe/1.30\r\nAccept: */*\r\n\r\n") == path
    assert plain_probe(head + b"User-Agent: HAProxy\r\nX-Forwarded-For: 10.0.0.1\r\nHost: x\r\n\r\n") == path


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost:\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\x00\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nAccept: a\r\n b\r\n\r\n",
        b"GET /health HTTP/1.0\r\nHost: x\r\n\r\n",
        b"GET /health?verbose HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://x/health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET  /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics?name[]=x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /ping HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS /health HTTP/1.1\r\nHost: x\r\n\r\n",
        PLAIN + PLAIN,
        PLAIN + b"x",
        PLAIN[:-2],
        *(
            b"GET /health HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n"
            for line in (
                b"Connection: close",
                b"Content-Length: 0",
                b"Content-Length: 5",
                b"Transfer-Encoding: chunked",
                b"Upgrade: h2c",
                b"Expect: 100-continue",
                b"Origin: http://a.example",
                b"X-Request-Id: mine",
                b"X-data-parallel-rank: 1",
                b"endpoint-load-metrics-format: JSON",
                b"Unknown: x",
                b"H\xc3\xb6st: x",
                b": x",
            )
        ),
    ],
)
def test_whatever_else_is_said_needs_a_real_parser(data: bytes) -> None:
    assert plain_probe(data) is None


@served()
async def test_the_answer_is_the_one_that_aiohttp_would_give(harness: Harness) -> None:
    async with connected(harness) as fast, connected(harness) as slow:
        for phase in (Phase.STARTING, Phase.READY, Phase.ENGINE_RESTARTING, Phase.ENGINE_DEAD):
            harness.front_end.phase = phase
            for path in STATE_PROBES:
                request = f"GET {path} HTTP/1.1\r\nHost: x\r\n".encode()
                assert PlainProbes(harness.front_end).answer(request + b"\r\n") is not None
                status, headers, body = await fast.ask(request + b"\r\n")
                slow_status, slow_headers, slow_body = await slow.ask(request + KEPT_BY_AIOHTTP + b"\r\n")
                assert (status, body, set(headers)) == (slow_status, slow_body, set(slow_headers))
                assert len(headers.pop("X-Request-Id")) == 32
                for name in ("Content-Type", "Server", "Retry-After"):
                    assert headers.get(name) == slow_headers.get(name)


@served()
async def test_a_scrape_is_the_one_that_aiohttp_would_give(harness: Harness) -> None:
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n"
    assert PlainProbes(harness.front_end).answer(request + b"\r\n") is not None
    async with connected(harness) as fast, connected(harness) as slow:
        status, headers, body = await fast.ask(request + b"\r\n")
        slow_status, slow_headers, slow_body = await slow.ask(request + KEPT_BY_AIOHTTP + b"\r\n")
    assert status == slow_status == b"HTTP/1.1 200 OK"
    assert set(headers) == set(slow_headers) and headers["Content-Type"] == slow_headers["Content-Type"]

    def series(text: bytes) -> list[bytes]:
        return [line if line.startswith(b"#") else line.rpartition(b" ")[0] for line in text.splitlines()]

    assert series(body) == series(slow_body)


@served()
async def test_a_probe_connection_may_go_on_with_anything(harness: Harness) -> None:
    async with connected(harness) as connection:
        body = b'{"prompt":"hello","max_tokens":2}'
        completion = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        completion += b"Content-Length: %d\r\n\r\n" % len(body) + body
        for _ in range(2):
            for parts in ([PLAIN], [PLAIN], [completion], [PLAIN[:20], PLAIN[20:]]):
                status, _, _ = await connection.ask(*parts)
                assert status == b"HTTP/1.1 200 OK"
        connection.writer.write(PLAIN + PLAIN + completion)
        for _ in range(3):
            assert (await connection.ask())[0] == b"HTTP/1.1 200 OK"


@served()
async def test_a_drain_ends_probe_connections_with_their_next_answer(harness: Harness) -> None:
    async with connected(harness) as connection:
        assert (await connection.ask(PLAIN))[0] == b"HTTP/1.1 200 OK"
        harness.front_end.drain()
        status, headers, body = await connection.ask(PLAIN)
        assert (
            status == b"HTTP/1.1 503 Service Unavailable" and headers["Connection"] == "close" and b"draining" in body
        )
        assert await connection.reader.read() == b""


@served(timeout_keep_alive=1)
async def test_an_idle_probe_connection_is_closed_like_any_other(harness: Harness) -> None:
    async with connected(harness) as connection:
        await connection.ask(PLAIN)
        await connection.ask(PLAIN)
        assert await connection.reader.read() == b""


class Transport(asyncio.Transport):
    """Takes what is written; `num_buffered` bytes have not left."""

    num_buffered = 0

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def get_write_buffer_size(self) -> int:
        return self.num_buffered

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("num_buffered", "written"), [(0, [b"answer"]), (1, [])])
def test_a_client_that_does_not_read_is_left_to_flow_control(num_buffered: int, written: list[bytes]) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError("not reached: the loop has no time")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        connection = HttpConnection(
            web.Server(handler), answer_probe=lambda data: b"answer", head_timeout_s=60, loop=loop
        )
        transport = Transport()
        connection.connection_made(transport)
        transport.num_buffered = num_buffered
        connection.data_received(PLAIN)
        assert transport.written == written
        connection.connection_lost(None)

    asyncio.run(run())
