"""Literal bytes on a connection: what a proxy, a broken client or an attacker may send."""

import asyncio
import gzip
import re
import resource
import socket
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from tests.server.harness import Harness, served

from tokring.server.event_stream import EventStream
from tokring_ipc import FinishReason

JSON = b"Content-Type: application/json\r\n"
BODY = b'{"prompt":"hello","max_tokens":2,"temperature":0}'
STREAM_BODY = BODY[:-1] + b',"stream":true}'
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def post(*headers: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"POST /v1/completions HTTP/" + version + b"\r\nHost: x\r\n" + JSON + lines + b"\r\n" + body


def sized(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


def chunked(pieces: Iterable[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def connect(harness: Harness) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = harness.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def exchange(harness: Harness, data: bytes) -> bytes:
    """All that the server answers until it closes."""
    reader, writer = await connect(harness)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) [A-Z]", answer)]


# ---- request smuggling: a proxy in front and this server must never disagree on where a request ends ----

SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
        post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n" + SMUGGLED),
        post(b"Content-Length: 0", b"Content-Length: %d" % len(SMUGGLED), body=SMUGGLED),
        post(b"Content-Length: +5", body=b"hello" + SMUGGLED),
        post(b"Content-Length: 0x5", body=b"hello" + SMUGGLED),
        post(b"Content-Length: 5, 5", body=b"hello" + SMUGGLED),
        post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n" + SMUGGLED),
        post(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n" + SMUGGLED),
        post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
        post(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n" + SMUGGLED),
        post(b"Transfer-Encoding: chunked", body=b"5;\nhello\r\n0\r\n\r\n" + SMUGGLED),
        post(b"Transfer-Encoding: chunked", body=b"-5\r\nhello\r\n0\r\n\r\n" + SMUGGLED),
        post(b"Transfer-Encoding: chunked", body=b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n" + SMUGGLED),
        post(b"Transfer-Encoding: chunked", body=b"5\r\nhelloXX0\r\n\r\n" + SMUGGLED),
        HEALTH + b" folded: continuation\r\n\r\n",
        HEALTH + b"A: b\r\n c\r\n\r\n",
        HEALTH + b"A: b\x00c\r\n\r\n",
        HEALTH + b"A\x01: b\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n" + SMUGGLED,
        HEALTH + b"A: b\n\r\n" + SMUGGLED,
        HEALTH + b"A: b\rC: d\r\n\r\n",
        HEALTH + b": nameless\r\n\r\n",
    ],
)
@served()
async def test_ambiguous_framing_is_a_400_and_ends_the_connection(harness: Harness, data: bytes) -> None:
    answer = await exchange(harness, data)
    assert statuses(answer) == [400], answer[:300]
    assert b'"error":{"message":' in answer and b"Traceback" not in answer


@pytest.mark.parametrize("count", [127, 1000])
@served()
async def test_headers_are_bounded(harness: Harness, count: int) -> None:
    answer = await exchange(harness, HEALTH + b"Connection: close\r\n" + b"A: b\r\n" * (count - 2) + b"\r\n")
    assert statuses(answer) == [200 if count < 128 else 400]


@served()
async def test_long_lines_are_refused(harness: Harness) -> None:
    for data in (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", HEALTH + b"A" * 9000 + b": b\r\n\r\n"):
        assert statuses(await exchange(harness, data)) == [400]


# ---- bodies ----


@pytest.mark.parametrize("sizes", [[1] * len(BODY), [len(BODY)], [10, len(BODY) - 10]])
@served()
async def test_uploads_may_be_chunked(harness: Harness, sizes: list[int]) -> None:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(BODY[start : start + size])
        start += size
    data = post(b"Transfer-Encoding: chunked", b"Connection: close", body=chunked(pieces))
    answer = await exchange(harness, data)
    assert statuses(answer) == [200] and b'"finish_reason":"length"' in answer


@served()
async def test_a_client_that_asks_first_is_told_to_go_on(harness: Harness) -> None:
    reader, writer = await connect(harness)
    writer.write(post(sized(BODY), b"Expect: 100-continue", b"Connection: close"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert statuses(await reader.read()) == [200]
    writer.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post(sized(BODY), b"Expect: 100-continue").replace(b"application/json", b"text/plain"), 415),
        (post(b"Content-Length: 9999999999", b"Expect: 100-continue"), 413),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n", 200),
    ],
)
@served()
async def test_a_client_that_asks_first_is_not_asked_for_a_body_that_nobody_wants(
    harness: Harness, data: bytes, status: int
) -> None:
    reader, writer = await connect(harness)
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    # What the client sends next may be the body or not: nothing on this connection is taken for a request any more.
    assert statuses(head) == [status] and b"Connection: close" in head
    writer.close()


@served()
async def test_a_body_that_says_that_it_is_over_the_limit_is_a_413_before_it_comes(harness: Harness) -> None:
    reader, writer = await connect(harness)
    writer.write(post(b"Content-Length: 9999999999", body=b"{"))
    assert statuses(await reader.readuntil(b"\r\n\r\n")) == [413]
    writer.close()


@served()
async def test_an_unknown_expectation_fails(harness: Harness) -> None:
    answer = await exchange(harness, post(sized(BODY), b"Expect: 200-maybe", b"Connection: close", body=BODY))
    assert statuses(answer) == [417] and b'"error":{"message":' in answer


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        (b"gzip", gzip.compress(BODY, mtime=0)),
        (b"GZIP", gzip.compress(BODY, mtime=0)),
        (b"deflate", zlib.compress(BODY)),
        (b"deflate", zlib.compress(BODY, wbits=-15)),  # without zlib's head, as some clients send it
        (b"identity", BODY),
    ],
)
@served()
async def test_a_compressed_body_is_read(harness: Harness, encoding: bytes, body: bytes) -> None:
    data = post(sized(body), b"Content-Encoding: " + encoding, b"Connection: close", body=body)
    assert statuses(await exchange(harness, data)) == [200]
    data = post(b"Transfer-Encoding: chunked", b"Content-Encoding: " + encoding, body=chunked([body[:5], body[5:]]))
    assert statuses(await exchange(harness, data + SMUGGLED)) == [200, 200]


@served()
async def test_an_encoding_that_is_not_known_is_a_415(harness: Harness) -> None:
    for encoding in (b"br", b"zstd", b"gzip, gzip", b"x"):
        answer = await exchange(harness, post(sized(BODY), b"Content-Encoding: " + encoding, body=BODY) + SMUGGLED)
        assert statuses(answer) == [415, 200] and b'"error":{"message":' in answer, answer[:300]


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
@served()
async def test_a_body_that_is_not_compressed_as_it_says_is_a_400(harness: Harness, encoding: bytes) -> None:
    cut, longer = gzip.compress(BODY)[:-3], gzip.compress(BODY) + b"x"
    for data in (b"\0" * 50, BODY, b"", cut, longer):
        answer = await exchange(harness, post(sized(data), b"Content-Encoding: " + encoding, body=data) + SMUGGLED)
        assert statuses(answer)[0] == 400 and b'"error":{"message":' in answer, answer[:300]
        assert b"Traceback" not in answer


@served(max_body_bytes=1 << 20)
async def test_a_gzip_bomb_is_a_413(harness: Harness) -> None:
    bomb = gzip.compress(b'{"prompt":"' + b"a" * (64 << 20) + b'"}', 9)
    assert len(bomb) < 1 << 17
    answer = await exchange(harness, post(sized(bomb), b"Content-Encoding: gzip", b"Connection: close", body=bomb))
    assert statuses(answer) == [413], answer[:300]


@served(api_key=("KEY",))
async def test_a_body_that_nobody_wants_is_not_decompressed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("a decompressor was made")

    body = gzip.compress(BODY)
    monkeypatch.setattr(zlib, "decompressobj", fails)
    data = post(sized(body), b"Content-Encoding: gzip", body=body)
    assert statuses(await exchange(harness, data + SMUGGLED)) == [401, 401]


@served(max_body_bytes=2048)
async def test_a_body_over_the_limit_is_a_413_sized_or_chunked(harness: Harness) -> None:
    body = b'{"prompt":"' + b"a" * 4000 + b'"}'
    for data in (post(sized(body), body=body), post(b"Transfer-Encoding: chunked", body=chunked([body]))):
        reader, writer = await connect(harness)
        writer.write(data)
        assert b" 413 " in await reader.readline()
        writer.close()
    assert 'tokring:requests_rejected_total{reason="too_large"} 2' in (await harness.get("/metrics")).body.decode()


@served()
async def test_the_end_of_a_clients_input_is_its_end(harness: Harness) -> None:
    """A half-close can't be told from a client that has left, which must cost the engine nothing: as nginx sees it."""
    harness.engine.hold()
    reader, writer = await connect(harness)
    writer.write(post(sized(STREAM_BODY), b"Connection: close", body=STREAM_BODY))
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    assert b"[DONE]" not in answer
    await harness.all_slots_are_free()
    assert all(reason is FinishReason.ABORT for _, reason in harness.engine.finished)


# ---- slow ones ----


@served(request_timeout=0.1)
async def test_heads_that_never_end_are_given_up(harness: Harness) -> None:
    silent, silent_writer = await connect(harness)
    dripping, writer = await connect(harness)
    for byte in (b"G", b"E", b"T"):
        writer.write(byte)
        await asyncio.sleep(0)
    assert await silent.read() == b"" and await dripping.read() == b""
    silent_writer.close()
    writer.close()


@served(request_timeout=0.1)
async def test_a_body_that_never_ends_is_a_408(harness: Harness) -> None:
    reader, writer = await connect(harness)
    writer.write(post(b"Content-Length: 100", body=b'{"prompt":'))
    assert b" 408 " in await reader.readline()
    writer.close()


@served(request_timeout=2)
async def test_a_crowd_of_silent_and_half_requests_is_given_up_and_keeps_nobody_from_being_served(
    harness: Harness, many_descriptors: None
) -> None:
    """p22"""
    half_body = post(b"Content-Length: 100", body=b'{"prompt":')
    begun = [b""] * 500 + [b"POST /v1/completions HTTP/1.1\r\nHos"] * 100 + [half_body] * 100
    crowd = [await connect(harness) for _ in begun]
    for (_, writer), data in zip(crowd, begun, strict=True):
        writer.write(data)
    answers = await asyncio.gather(*(harness.complete(max_tokens=3) for _ in range(20)))
    assert all(answer.finish_reasons == ["length"] for answer in answers)
    ends = await asyncio.gather(*(reader.read() for reader, _ in crowd))
    assert ends[:600] == [b""] * 600
    assert all(end.startswith(b"HTTP/1.1 408 ") for end in ends[600:])
    for _, writer in crowd:
        writer.close()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@served(request_timeout=0.1)
async def test_the_head_time_out_does_not_end_what_has_begun(harness: Harness) -> None:
    harness.engine.hold()
    reader, writer = await connect(harness)
    writer.write(post(sized(STREAM_BODY), b"Connection: close", body=STREAM_BODY))
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    await asyncio.sleep(0.15)
    harness.engine.go_on()
    assert (await reader.read()).endswith(b"0\r\n\r\n")
    writer.close()


# ---- connections ----


@served()
async def test_many_pipelined_requests_are_answered_in_order(harness: Harness) -> None:
    get = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: %d\r\n\r\n"
    data = b"".join(get % number for number in range(20)) + SMUGGLED
    answer = await exchange(harness, data)
    assert statuses(answer) == [200] * 21
    ids = [line.split(b": ")[1] for line in answer.split(b"\r\n") if line.lower().startswith(b"x-request-id")]
    assert ids[:20] == [b"%d" % number for number in range(20)]


@served()
async def test_http_1_0_closes_unless_asked_to_keep_alive(harness: Harness) -> None:
    answer = await exchange(harness, post(sized(BODY), body=BODY, version=b"1.0"))
    assert statuses(answer) == [200] and b"chunked" not in answer.lower()
    kept = post(sized(BODY), b"Connection: keep-alive", body=BODY, version=b"1.0")
    answer = await exchange(harness, kept + post(sized(BODY), body=BODY, version=b"1.0"))
    assert statuses(answer) == [200, 200]


@served()
async def test_a_stream_over_http_1_0_ends_with_its_connection_whatever_was_asked_for(harness: Harness) -> None:
    kept = post(sized(STREAM_BODY), b"Connection: keep-alive", body=STREAM_BODY, version=b"1.0")
    answer = await exchange(harness, kept + SMUGGLED)
    assert statuses(answer) == [200] and answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("version", [b"2.0", b"0.9"])
@served()
async def test_other_versions_of_http_are_refused_in_http_1_1(harness: Harness, version: bytes) -> None:
    answer = await exchange(harness, HEALTH.replace(b"HTTP/1.1", b"HTTP/" + version) + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 505 ") and b'"error":{"message":' in answer, answer[:300]


@served()
async def test_head_has_no_body_and_options_says_what_is_allowed(harness: Harness) -> None:
    answer = await exchange(harness, b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert statuses(answer) == [200] and answer.endswith(b"\r\n\r\n")
    options = b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\nConnection: close\r\n\r\n"
    answer = await exchange(harness, options)
    assert statuses(answer) == [204] and b"Access-Control-Allow-Methods: GET, POST, OPTIONS" in answer


@served()
async def test_the_last_chunk_ends_a_stream_and_nothing_follows(harness: Harness) -> None:
    reader, writer = await connect(harness)
    for _ in range(2):  # on one connection: the bytes of an answer's end belong to no other
        writer.write(post(sized(STREAM_BODY), body=STREAM_BODY))
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


class CountedTransport:
    """Counts how often somebody looks whether it has drained."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.num_looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_write_buffer_size(self) -> int:
        self.num_looks += 1
        return int(self._transport.get_write_buffer_size())


@served()
async def test_a_stream_behind_answers_that_nobody_reads_waits_without_polling(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket is full, and aiohttp holds the end of an answer: the stream must not be mixed into it."""
    starting: list[CountedTransport] = []
    start = EventStream.start

    async def watched(stream: EventStream, first_events: bytes) -> None:
        transport = CountedTransport(stream._transport)
        stream._transport = transport  # type: ignore[assignment]
        starting.append(transport)
        await start(stream, first_events)
        starting.remove(transport)

    monkeypatch.setattr(EventStream, "start", watched)
    host, port = harness.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        tokens = b'{"tokens":[%s70]}' % (b"70," * 30_000)
        text = post(sized(tokens), body=tokens).replace(b"/v1/completions", b"/detokenize")
        stream = post(sized(STREAM_BODY), body=STREAM_BODY)
        num_pairs = 40
        sending = asyncio.ensure_future(loop.sock_sendall(client, (text + stream) * num_pairs + SMUGGLED))
        await harness.until(lambda: bool(starting) and bool(starting[0].get_write_buffer_size()))
        num_looks = starting[0].num_looks
        for _ in range(100):
            await asyncio.sleep(0)
        assert starting[0].num_looks == num_looks
        answer = bytearray()
        while data := await loop.sock_recv(client, 1 << 20):
            answer += data
        await sending
    assert statuses(bytes(answer)) == [200] * (2 * num_pairs + 1) and answer.count(b"data: [DONE]") == num_pairs
