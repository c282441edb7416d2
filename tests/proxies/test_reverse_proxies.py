"""nginx and HAProxy as they are commonly configured, in front of a server whose engine the test paces."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.proxies.programs import free_port, needs, running
from tests.server.harness import Harness, running_server

NGINX = """
daemon off; worker_processes 1; pid nginx.pid; error_log stderr warn;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_temp_path body; proxy_temp_path proxy;
  fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  upstream backends {{ {servers} keepalive 8; keepalive_timeout 110s; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://backends;
      proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_next_upstream error http_503 non_idempotent;
    }}
  }}
}}
"""
HAPROXY = """
global
  maxconn 64
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  option redispatch
  retries 3
  retry-on conn-failure empty-response 503
frontend in
  bind 127.0.0.1:{port}
  default_backend backends
backend backends
  balance roundrobin
  default-server pool-purge-delay 110s
  http-reuse always
  {servers}
"""


@contextlib.contextmanager
def nginx(ports: Sequence[int], directory: Path):  # type: ignore[no-untyped-def]
    program, port = needs("nginx"), free_port()
    servers = " ".join(f"server 127.0.0.1:{backend} max_fails=0;" for backend in ports)
    path = directory / "nginx.conf"
    path.write_text(NGINX.format(servers=servers, port=port))
    with running([program, "-p", str(directory), "-c", str(path)], port, directory):
        yield port


@contextlib.contextmanager
def haproxy(ports: Sequence[int], directory: Path):  # type: ignore[no-untyped-def]
    program, port = needs("haproxy"), free_port()
    servers = "\n  ".join(f"server s{index} 127.0.0.1:{backend}" for index, backend in enumerate(ports))
    path = directory / "haproxy.cfg"
    path.write_text(HAPROXY.format(servers=servers, port=port))
    with running([program, "-db", "-f", str(path)], port, directory):
        yield port


IDLE_S = 65  # most proxies keep a connection for a minute
proxies = pytest.mark.parametrize("proxy", [nginx, haproxy])
Proxy = Callable[[Sequence[int], Path], contextlib.AbstractContextManager[int]]


def port_of(server: Harness) -> int:
    return int(server.url.rpartition(":")[2])


async def events_of(server: Harness, url: str) -> AsyncIterator[bytes]:
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "stream": True}
    async with server.session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield line[6:].strip()


@proxies
def test_chunks_come_through_one_by_one(proxy: Proxy, tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), running_server() as server:
            with proxy([port_of(server)], tmp_path) as port:
                server.engine.hold()
                events = events_of(server, f"http://127.0.0.1:{port}")
                for _ in range(4):
                    # The next token is made only when the one before has come through: nothing waits for more.
                    server.engine.allow(1)
                    assert b'"text":"' in await anext(events)
                server.engine.go_on()
                rest = [event async for event in events]
                assert rest[-1] == b"[DONE]" and b'"finish_reason":"length"' in rest[0]

    asyncio.run(run())


@proxies
def test_a_503_is_tried_again_on_the_next_server(proxy: Proxy, tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), running_server() as draining, running_server() as ready:
            draining.front_end.drain()
            with proxy([port_of(draining), port_of(ready)], tmp_path) as port:
                for _ in range(4):
                    body = {"prompt": "hello", "max_tokens": 2}
                    url = f"http://127.0.0.1:{port}/v1/completions"
                    async with ready.session.post(url, json=body) as answer:
                        assert answer.status == 200
                assert len(ready.engine.all_requests) == 4

    asyncio.run(run())


@proxies
def test_a_request_on_a_kept_connection_that_its_server_ends_is_tried_again(proxy: Proxy, tmp_path: Path) -> None:
    """A drain that has nothing to wait for ends while proxies still hold connections."""

    async def run() -> None:
        lost = asyncio.Event()

        async def one_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ending.close()
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await read_request(reader)
            writer.close()
            lost.set()

        ending = await asyncio.start_server(one_answer, "127.0.0.1", 0)
        async with asyncio.timeout(30), running_server() as staying:
            with proxy([ending.sockets[0].getsockname()[1], port_of(staying)], tmp_path) as port:
                while not lost.is_set():
                    body = {"prompt": "hello", "max_tokens": 2}
                    async with staying.session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
                        assert answer.status == 200
                        await answer.read()

    asyncio.run(run())


async def read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    assert length is not None
    await reader.readexactly(int(length[1]))


@proxies
def test_kept_connections_serve_streams_and_bodies_in_turn(proxy: Proxy, tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), running_server() as server:
            with proxy([port_of(server)], tmp_path) as port:
                url = f"http://127.0.0.1:{port}"
                for _ in range(5):
                    assert [event async for event in events_of(server, url)][-1] == b"[DONE]"
                    async with server.session.get(f"{url}/v1/models") as answer:
                        assert answer.status == 200

    asyncio.run(run())


def connections_to(server: Harness) -> set[int]:
    """Client ports of the open connections."""
    connections = psutil.Process().net_connections("tcp")
    is_open = (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT)
    return {one.raddr.port for one in connections if one.laddr.port == port_of(server) and one.status in is_open}


async def complete(server: Harness, port: int) -> None:
    url, body = f"http://127.0.0.1:{port}/v1/completions", {"prompt": "hello", "max_tokens": 2}
    async with server.session.post(url, json=body, headers={"Connection": "close"}) as answer:
        assert answer.status == 200, await answer.text()


@proxies
def test_a_connection_that_the_server_gave_up_costs_no_request(proxy: Proxy, tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), running_server(timeout_keep_alive=0.3) as server:
            with proxy([port_of(server)], tmp_path) as port:
                for _ in range(2):
                    await complete(server, port)
                    await server.until(lambda: not connections_to(server))

    asyncio.run(run())


@pytest.mark.skipif(not os.environ.get("TOKRING_TEST_PROXIES"), reason="takes a minute: run by `make test-proxies`")
def test_connections_stay_open_over_a_minute_of_idleness(tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(IDLE_S + 50), running_server() as server:
            with contextlib.ExitStack() as stack:
                ports = []
                for proxy in (nginx, haproxy):
                    directory = tmp_path / proxy.__name__
                    directory.mkdir()
                    ports.append(stack.enter_context(proxy([port_of(server)], directory)))
                    await complete(server, ports[-1])
                kept = connections_to(server)
                assert len(kept) == 2
                await asyncio.sleep(IDLE_S)
                for port in ports:
                    await complete(server, port)
                assert connections_to(server) == kept, "no new connection was needed"

    asyncio.run(run())
