"""EventStream: one client's server-sent events; headers by aiohttp, then the token path owns the descriptor."""

import asyncio
import logging
import time
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion11, StreamWriter

from tokring.server.engine_client import EngineClient
from tokring.server.stream import Stream

logger = logging.getLogger(__name__)

PING = b": ping\n\n"
PING_AFTER_NS = 15 * 10**9
DONE = b"data: [DONE]\n\n"
MAX_TRANSPORT_BYTES = 1 << 20
MAX_DRAIN_S = 60.0  # for what a client has not read of earlier answers
SENT_STATUS: web.RequestKey[int] = web.RequestKey("sent_status", int)  # of an answer that has left as a whole
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(json: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + json + b"\n\n"


class ClientGone(Exception):
    """The client has left or reads too slowly: there is nobody to answer."""


class EventStream:
    """Order of use: created (a paused token-path connection), send_early() …, start(), write() …, finish(); close().

    Between start() and finish() nobody but the token path writes to the client.
    """

    def __init__(self, request: web.Request, engine: EngineClient) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        self._request = request
        self._engine = engine
        self._transport = transport
        self.response = web.StreamResponse(headers=HEADERS)
        chunked = request.version >= HttpVersion11
        if not chunked:  # only its end tells where the body ends; aiohttp would keep it if the client asked for that
            self.response.force_close()
        self.connection = engine.token_path.connect(chunked=chunked)
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[str] = loop.create_future()
        self._sent: asyncio.Future[None] = loop.create_future()  # everything has left
        self._writer: StreamWriter | None = None
        self._last_write_ns = time.monotonic_ns()
        self.streams: list[Stream] = []  # what is sent here
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        self._is_attached = False
        self._is_paused = False
        engine.connections[self.connection] = self

    async def send_early(self, events: bytes) -> None:
        """Sends the headers, if they are not out, and events by aiohttp: before start()."""
        try:
            if self._writer is None:
                writer = await self.response.prepare(self._request)
                assert isinstance(writer, StreamWriter)
                self._writer = writer
            await self.response.write(events)
        except ConnectionResetError:
            raise ClientGone("the client is gone") from None

    async def start(self, first_events: bytes) -> None:
        """Sends the first events, then hands the descriptor to the token path."""
        await self.send_early(first_events)
        await self._drain()
        if self._transport.is_closing():
            raise ClientGone("the client is gone")
        descriptor = -1 if self._is_tls else self._transport.get_extra_info("socket").fileno()
        self._is_attached = True
        self._engine.handle_events(self._engine.token_path.attach(self.connection, descriptor))

    async def _drain(self) -> None:
        """Two writers on one socket would mix their bytes: waits until aiohttp's are out, those of earlier answers too.

        With TLS all bytes go by the transport.
        """
        if self._is_tls or not self._transport.get_write_buffer_size():
            return
        assert self._writer is not None
        self._transport.set_write_buffer_limits(high=0)  # what "drained" means
        try:
            async with asyncio.timeout(MAX_DRAIN_S):
                await self._writer.drain()
        except ConnectionResetError:
            raise ClientGone("the client is gone") from None
        except TimeoutError:
            raise ClientGone("the client reads too slowly") from None
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits()  # back to the defaults

    def write(self, events: bytes, *, end: bool = False) -> None:
        """Sends whole events behind all text released so far; `end`: the last ones, the end of the body with them."""
        self._last_write_ns = time.monotonic_ns()
        self._engine.handle_events(self._engine.token_path.write(self.connection, events, end=end))

    async def finish(self) -> None:
        """After write(end=True): waits until everything is in the socket and takes the descriptor back."""
        await self._until_sent()
        self._engine.connections.pop(self.connection, None)
        self._engine.token_path.disconnect(self.connection)
        self._is_attached = False
        if self._writer is not None:
            self._writer.chunked = False  # the token path has sent the last chunk: aiohttp has nothing to add
            self._writer.set_eof()

    async def _until_sent(self) -> None:
        if not self._sent.done():
            either: tuple[asyncio.Future[Any], ...] = (self._sent, self.gone)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._sent.done():
            raise ClientGone(self.gone.result())

    def close(self) -> None:
        """Frees the token path's connection if finish() did not; an unfinished answer ends the client connection."""
        if self._engine.connections.pop(self.connection, None) is not None:
            self._engine.token_path.disconnect(self.connection)
            if self.response.prepared:
                self._transport.abort()

    # ---- called by the EngineClient ----

    def deliver(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def sent(self) -> None:
        """All that write(end=True) ended has left: a client that goes from here on has had its answer."""
        self._request[SENT_STATUS] = self.response.status
        if not self._sent.done():
            self._sent.set_result(None)

    def lost(self, reason: str) -> None:
        if not self.gone.done():
            self.gone.set_result(reason)

    def tick(self, now_ns: int) -> None:
        """Once a second: a ping after 15 s of silence; a full TLS transport is left alone until it has drained."""
        if not self._is_attached:
            return
        path = self._engine.token_path
        if self._is_tls:
            self._control_flow()
        if now_ns - max(self._last_write_ns, self._last_output_ns()) >= PING_AFTER_NS and not path.backlog(
            self.connection
        ):
            self.write(PING)

    def _last_output_ns(self) -> int:
        """CLOCK_MONOTONIC of the latest token of the streams that are sent here."""
        return max((self._engine.token_path.result(stream.slot).last_publish_ns for stream in self.streams), default=0)

    def _control_flow(self) -> None:
        path = self._engine.token_path
        is_full = self._transport.get_write_buffer_size() > MAX_TRANSPORT_BYTES
        if is_full and not self._is_paused:
            path.pause(self.connection)
        elif self._is_paused and not is_full:
            self._engine.handle_events(path.resume(self.connection))
        self._is_paused = is_full
