"""What may come back: well-formed answers, OpenAI's error object, and no status of 500 or above but 503 and 505."""

import re
from dataclasses import dataclass

import orjson

STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3}) [^\r\n]*\r\n")
ERROR_FIELDS = {"message", "type", "param", "code"}


class WrongAnswer(AssertionError):
    """The server answered something that it must not."""


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    rest: bytes  # what follows it


def check_whole(data: bytes) -> int:
    """All the bytes that came for one whole request. Returns the status. Raises WrongAnswer."""
    answer = parse(data)
    if answer.rest:
        raise WrongAnswer(f"more than one answer: {answer.rest[:200]!r}")
    _check_status(answer.status)
    kind = answer.headers.get(b"content-type", b"")
    if answer.status != 200:
        _check_error(answer.body)
    elif kind.startswith(b"text/event-stream"):
        _check_events(answer.body)
    elif kind.startswith(b"application/json"):
        _json(answer.body)
    return answer.status


def check_some(data: bytes) -> None:
    """What came, perhaps not all of it, for bytes that may be no request or several. Raises WrongAnswer."""
    if data and not (found := STATUS_LINE.match(data)) and len(data) > 64:
        raise WrongAnswer(f"no status line: {data[:100]!r}")
    for found in STATUS_LINE.finditer(data):
        _check_status(int(found[1]))


def parse(data: bytes) -> HttpAnswer:
    """The first answer, whole. Raises WrongAnswer."""
    head, separator, rest = data.partition(b"\r\n\r\n")
    found = STATUS_LINE.match(head + b"\r\n")
    if not separator or not found:
        raise WrongAnswer(f"no whole head: {data[:300]!r}")
    status = int(found[1])
    headers = {}
    for line in head.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b": ")
        if not colon or not re.fullmatch(rb"[A-Za-z0-9-]+", name) or re.search(rb"[\x00-\x08\n-\x1f\x7f]", value):
            raise WrongAnswer(f"a header line that is none: {line[:200]!r}")
        headers[name.lower()] = value
    if status == 100:
        return parse(rest)
    if headers.get(b"transfer-encoding") == b"chunked":
        body, rest = _unchunked(rest)
    else:
        length = int(headers.get(b"content-length", b"0"))
        if len(rest) < length:
            raise WrongAnswer(f"a body of {len(rest)} of {length} bytes")
        body, rest = rest[:length], rest[length:]
    return HttpAnswer(status, headers, body, rest)


def _unchunked(data: bytes) -> tuple[bytes, bytes]:
    parts = []
    while True:
        size_text, separator, data = data.partition(b"\r\n")
        if not separator or not re.fullmatch(rb"[0-9a-fA-F]+", size_text):
            raise WrongAnswer(f"no chunk size: {size_text[:100]!r}")
        size = int(size_text, 16)
        if data[size : size + 2] != b"\r\n":
            raise WrongAnswer(f"a chunk of {size} bytes does not end")
        parts.append(data[:size])
        data = data[size + 2 :]
        if not size:
            return b"".join(parts), data


def _check_status(status: int) -> None:
    if not 100 <= status < 500 and status not in (503, 505):
        raise WrongAnswer(f"status {status}")


def _check_error(body: bytes) -> None:
    value = _json(body)
    if not isinstance(value, dict) or set(value.get("error", ())) != ERROR_FIELDS or not value["error"]["message"]:
        raise WrongAnswer(f"not an error object: {body[:300]!r}")


def _check_events(body: bytes) -> None:
    if not body.endswith(b"data: [DONE]\n\n") or body.count(b"data: [DONE]") != 1:
        raise WrongAnswer(f"a stream without its one end: {body[-300:]!r}")
    for event in body.split(b"\n\n")[:-2]:
        if event.startswith(b"data: "):
            value = _json(event[6:])
            if "error" in value:
                _check_error(event[6:])
                if value["error"]["type"] == "server_error":
                    raise WrongAnswer(f"an error of the server's in a stream: {event[:300]!r}")
        elif not event.startswith(b":"):
            raise WrongAnswer(f"no event: {event[:300]!r}")


def _json(data: bytes):  # type: ignore[no-untyped-def]
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise WrongAnswer(f"no JSON ({error}): {data[:300]!r}") from None
