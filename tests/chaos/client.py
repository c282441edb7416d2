"""One request over one connection, byte by byte: what came, whether it is whole, and what it says."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

DEADLINE_S = 300.0  # of one exchange; far beyond what any of them takes


@dataclass(frozen=True, slots=True)
class Pace:
    """How a client reads: `bytes_at_once`, then a rest."""

    bytes_at_once: int = 65536
    rest_s: float = 0.0


FAST = Pace()
SLOW = Pace(700, 0.02)


@dataclass(slots=True)
class Exchange:
    """What happened on one connection. Times: the event loop's, seconds."""

    started: float = 0.0
    ended: float = 0.0
    port: int = 0  # ours
    status: int = 0  # 0: no head came
    body: bytes = b""
    is_whole: bool = False
    error: str = ""


@dataclass(slots=True)
class Answer:
    """What a client learns. `cached_tokens` is left out of usage: it depends on who ran before."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    error: str = ""

    def starts_like(self, other: Answer) -> bool:
        """Whether this, cut off somewhere, is the beginning of the other one."""
        return all(other.texts.get(index, "").startswith(text) for index, text in self.texts.items())


def request_bytes(route: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/{route} HTTP/1.1\r\nHost: chaos\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


async def exchange(
    address: tuple[str, int], request: bytes, pace: Pace = FAST, on_data: Callable[[], None] = lambda: None
) -> Exchange:
    """Sends a request that asks for the connection's end, and reads to it. Never raises for what the server does."""
    loop = asyncio.get_running_loop()
    done = Exchange(started=loop.time())
    client = socket.socket()
    client.setblocking(False)
    received = bytearray()
    try:
        if pace is not FAST:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with asyncio.timeout(DEADLINE_S):
            await loop.sock_connect(client, address)
            done.port = client.getsockname()[1]
            await loop.sock_sendall(client, request)
            while data := await loop.sock_recv(client, pace.bytes_at_once):
                received += data
                on_data()
                if pace.rest_s:
                    await asyncio.sleep(pace.rest_s)
    except (OSError, TimeoutError) as error:
        done.error = f"{type(error).__name__}: {error}"
    finally:
        client.close()
    done.ended = loop.time()
    _take_apart(done, bytes(received))
    return done


def _take_apart(done: Exchange, received: bytes) -> None:
    head, separator, rest = received.partition(b"\r\n\r\n")
    if not separator:
        return
    lines = head.decode("latin-1").split("\r\n")
    done.status = int(lines[0].split(" ")[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if headers.get("transfer-encoding") == "chunked":
        done.body, done.is_whole = _dechunk(rest)
    else:
        done.body, done.is_whole = rest, len(rest) == int(headers.get("content-length", -1))


def _dechunk(data: bytes) -> tuple[bytes, bool]:
    """The body, and whether its last chunk has come."""
    body = bytearray()
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end].split(b";")[0], 16)
        if size == 0:
            return bytes(body), True
        body += data[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return bytes(body), False


def read_answer(done: Exchange, *, is_stream: bool) -> Answer:
    """Puts the parts together; `error` says what is wrong with it, "" if it came to its proper end."""
    answer = Answer()
    try:
        parts = _events(done.body) if is_stream else [json.loads(done.body)] if done.is_whole else []
        for part in parts:
            _add(answer, part)
    except (ValueError, KeyError, TypeError) as error:
        answer.error = f"nonsense: {error!r}"
        return answer
    ended = done.body.endswith(b"data: [DONE]\n\n") if is_stream else bool(answer.reasons)
    if done.status != 200 or not done.is_whole or not ended:
        answer.error = answer.error or f"status {done.status}, whole: {done.is_whole}, ended: {ended}; {done.error}"
    return answer


def _events(body: bytes) -> list[dict[str, Any]]:
    events = body.split(b"\n\n")[:-1]  # what follows the last empty line is half an event
    return [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]


def _add(answer: Answer, part: dict[str, Any]) -> None:
    if "error" in part:
        answer.error = json.dumps(part["error"])
        return
    for choice in part["choices"]:
        index = choice["index"]
        message = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or message.get("content") or ""
        answer.texts[index] = answer.texts.get(index, "") + text
        if choice["finish_reason"]:
            answer.reasons[index] = choice["finish_reason"]
        if logprobs := choice.get("logprobs"):
            values = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or []]
            answer.logprobs.setdefault(index, []).extend(values)
    if usage := part.get("usage"):
        answer.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
