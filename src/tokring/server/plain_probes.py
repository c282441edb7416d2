"""PlainProbes: answers to the simplest of probe requests, from their bytes to bytes.

A balancer asks /health again and again on a connection of its own, and must be answered while everything else is busy;
a scraper does the same with /metrics.
Only a request that is whole, alone in its packet and without anything that could change the answer is taken here; all
others go through aiohttp, whose answers are the same.
"""

import re
import time
from email.utils import formatdate
from functools import lru_cache

from aiohttp.http import SERVER_SOFTWARE

from tokring.server.front_end import FrontEnd, Phase
from tokring.server.metrics import CONTENT_TYPE, metrics_body
from tokring.server.request_id import new_request_id
from tokring.server.state_probes import RETRY_AFTER_S, STATE_PROBES, probe_body

MAX_BYTES = 1024
_REQUEST = re.compile(
    rb"GET (/[a-z/]+) HTTP/1\.1\r\n((?:[A-Za-z-]+: ?[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\r\n)+)\r\n"
)
_NAME = re.compile(rb"^[^:]+", re.MULTILINE)
# Nothing in these changes what the answer is or whether the connection stays open.
_HARMLESS = frozenset(
    b"host user-agent accept accept-encoding accept-language authorization cache-control pragma traceparent tracestate "
    b"forwarded via x-forwarded-for x-forwarded-host x-forwarded-port x-forwarded-proto x-real-ip "
    b"x-prometheus-scrape-timeout-seconds".split()
)
_HEAD = (
    "HTTP/1.1 %s\r\n"
    "Content-Type: %s\r\n"
    "X-Request-Id: %s\r\n"
    "%s"
    "Content-Length: %d\r\n"
    "Date: %s\r\n"
    f"Server: {SERVER_SOFTWARE}\r\n\r\n"
)


@lru_cache(maxsize=256)
def plain_probe(data: bytes) -> str | None:
    """The path if `data` is exactly one plain request to a state probe or /metrics, else None."""
    found = _REQUEST.fullmatch(data)
    if found is None:
        return None
    path = found[1].decode()
    names = [name.lower() for name in _NAME.findall(found[2])]
    if path not in (*STATE_PROBES, "/metrics") or names.count(b"host") != 1 or not _HARMLESS.issuperset(names):
        return None
    return path


class PlainProbes:
    """For every connection of the process."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end
        self._date = ""
        self._date_s = 0

    def answer(self, data: bytes) -> bytes | None:
        """The whole answer to the request in `data`; None leaves it to aiohttp."""
        if len(data) > MAX_BYTES or not data.startswith(b"GET /"):
            return None
        path = plain_probe(data)
        if (
            path is None or self._front_end.phase is Phase.DRAINING or self._front_end.is_retiring
        ):  # whose answers end the connection
            return None
        if path == "/metrics":
            return self._answer("200 OK", CONTENT_TYPE, "", metrics_body(self._front_end))
        reason = STATE_PROBES[path](self._front_end)
        status, retry_after = "200 OK", ""
        if reason is not None:
            status, retry_after = "503 Service Unavailable", f"Retry-After: {RETRY_AFTER_S}\r\n"
        return self._answer(status, "application/json", retry_after, probe_body(reason))

    def _answer(self, status: str, content_type: str, retry_after: str, body: bytes) -> bytes:
        head = _HEAD % (status, content_type, new_request_id(), retry_after, len(body), self._now())
        return head.encode() + body

    def _now(self) -> str:
        """The Date header's value: made once a second."""
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date, self._date_s = formatdate(now_s, usegmt=True), now_s
        return self._date
