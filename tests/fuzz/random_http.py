"""Random HTTP: good requests in every form that a client may choose, and heads bent out of shape."""

import gzip
import random
import zlib
from dataclasses import dataclass

from tests.fuzz.random_json import ROUTES, Draw, damaged, random_body

GETS = ["/health", "/health/live", "/health/ready", "/health/started", "/ping", "/version", "/load", "/metrics"]
GETS += ["/v1/models", "/v1/models/x", "/openapi.json", "/nope", "/%00", "/..%2f", "/v1/models/%ff", "/?a=b#c"]
PROBE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
METHODS = [b"GET", b"HEAD", b"OPTIONS", b"POST", b"PUT", b"DELETE", b"TRACE", b"CONNECT", b"PRI", b"get", b"\0", b""]
# Put in between head lines or in their place.
LINES = [
    *(b"Content-Length: 5", b"Content-Length: 0", b"Content-Length: -1", b"Content-Length: +3", b"Content-Length: 9e9"),
    *(b"Content-Length: 99999999999999999999", b"Content-Length:", b"Content-Length: 3, 3", b"Content-Length : 3"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity"),
    *(b"Transfer-Encoding:\tchunked", b"transfer-encoding: CHUNKED", b"Transfer-Encoding: chunked, chunked"),
    *(b" folded", b"\tfolded: x", b"no colon", b": empty", b"A:", b"A" * 9000 + b": b", b"A: " + b"b" * 9000),
    *(b"Host: y", b"Host:", b"Connection: close", b"Connection: keep-alive", b"Connection: upgrade", b"Upgrade: h2c"),
    *(b"Upgrade: websocket", b"Expect: 100-continue", b"Expect: x", b"Content-Encoding: gzip", b"Content-Encoding: br"),
    *(b"Content-Encoding: deflate", b"Content-Type: text/plain", b"Content-Type: \xff", b"Authorization: Bearer \xff"),
    *(b"X-Request-Id: a\x01b", b"X-Request-Id: \xc3\xa9", b"traceparent: 00-x", b"x-slo-ttft-ms: nan", b"Origin: \0"),
    *(
        b"x-slo-ttft-ms: 1e400",
        b"X-data-parallel-rank: -1",
        b"endpoint-load-metrics-format: TEXT",
        b"Cookie: a=b; \x7f",
    ),
    *(b"endpoint-load-metrics-format: \xff", b"Accept-Encoding: gzip", b"Range: bytes=0-", b"If-None-Match: *"),
    *(b"Access-Control-Request-Headers: a\x0bb", b"Content-Length: 5\nHost: z", b"A: b\rC: d", b"A: b\0c"),
]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"HTTP/1.9", b"HTTP/9", b"http/1.1", b"", b"HTTP/1.1 x"]


@dataclass(frozen=True)
class Case:
    """Bytes for one connection, in the pieces they are sent in.

    is_whole: well-formed HTTP with a whole body, so that an answer must come and must be well-formed.
    leaves: the client closes as soon as it has sent this.
    """

    pieces: tuple[bytes, ...]
    is_whole: bool
    leaves: bool = False


def random_case(draw: Draw) -> Case:
    """Half of them good HTTP around a random body, half bent HTTP."""
    if draw.random() < 0.55:
        request = _post(draw, close=True)
        return Case(_cut(draw, request), is_whole=True, leaves=draw.random() < 0.1)
    request = draw.choice([_post, _post, _get])(draw, close=draw.random() < 0.5)
    head, separator, body = request.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    for _ in range(draw.choice([0, 1, 1, 2, 4])):
        _bend_line(draw, lines)
    data = draw.choice([b"\r\n"] * 9 + [b"\n"]).join(lines) + separator + body
    if draw.random() < 0.3:
        data = damaged(draw, data)
    if draw.random() < 0.3:
        data += draw.choice([_post, _get])(draw, close=draw.random() < 0.5)  # pipelined
    probes = (PROBE,) * draw.choice([0, 0, 0, 1, 3])  # answered in front of aiohttp
    return Case((*probes, *_cut(draw, data)), is_whole=False, leaves=draw.random() < 0.2)


def _bend_line(draw: Draw, lines: list[bytes]) -> None:
    kind = draw.randrange(5)
    if kind == 0:
        parts = [draw.choice(METHODS), draw.choice(GETS).encode(), draw.choice(VERSIONS)]
        lines[0] = b" ".join(parts)
    elif kind == 1:
        lines[draw.randrange(len(lines))] = draw.choice(LINES)
    elif kind == 2 and draw.random() < 0.2:
        lines += [b"A: b"] * draw.choice([50, 126, 1000])
    elif kind == 3 and len(lines) > 1:
        del lines[draw.randrange(len(lines))]
    else:
        lines.insert(draw.randrange(1, len(lines) + 1), draw.choice(LINES))


def _get(draw: Draw, close: bool) -> bytes:
    return b"\r\n".join([b"GET " + draw.choice(GETS).encode() + b" HTTP/1.1", b"Host: x", *_ending(close), b"", b""])


def _ending(close: bool) -> list[bytes]:
    return [b"Connection: close"] if close else []


def _post(draw: Draw, close: bool) -> bytes:
    """A well-formed POST, its body random, sized, chunked or compressed."""
    route = draw.choice([*list(ROUTES)[:2], *ROUTES])
    body = random_body(draw, route)
    lines = [b"POST " + route.encode() + b" HTTP/1.1", b"Host: x", b"Content-Type: application/json", *_ending(close)]
    if draw.random() < 0.1:
        compress = draw.choice([(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
        lines.append(b"Content-Encoding: " + compress[0])
        body = compress[1](body)
    if draw.random() < 0.3:
        lines.append(b"Transfer-Encoding: chunked")
        chunks = _cut(draw, body)
        body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks if chunk) + b"0\r\n\r\n"
    else:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", b""]) + body


def _cut(draw: Draw, data: bytes) -> tuple[bytes, ...]:
    """In up to five pieces."""
    if not data:
        return ()
    borders = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice([0, 0, 1, 4])))
    return tuple(data[start:stop] for start, stop in zip([0, *borders], [*borders, len(data)], strict=True))


def case_of(seed: int, number: int) -> Case:
    """The case of this number in a run with this seed: always the same."""
    return random_case(random.Random(f"{seed}/{number}"))
