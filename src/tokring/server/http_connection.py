"""HttpConnection: one client connection before aiohttp has made a request of its bytes."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tokring.server.errors import error_body
from tokring.server.request_id import new_request_id

logger = logging.getLogger(__name__)


class HttpConnection(web.RequestHandler):
    """aiohttp's protocol; refuses malformed requests in OpenAI's error shape, and gives up on heads that never end.

    Plain probes are answered here until the connection's first request of another kind.
    """

    __slots__ = ("_answer_probe", "_head_timeout_s", "_last_probe_s", "_timer")

    def __init__(
        self,
        manager: web.Server,
        *,
        answer_probe: Callable[[bytes], bytes | None],
        head_timeout_s: float,
        **settings: Any,
    ) -> None:
        super().__init__(manager, **settings)
        self._head_timeout_s = head_timeout_s
        self._answer_probe: Callable[[bytes], bytes | None] | None = answer_probe  # None: aiohttp has been given bytes
        self._last_probe_s = 0.0  # loop time; 0: there was none
        self._timer: asyncio.TimerHandle | None = None  # for the first head, or between two probes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The first head must arrive in time; later ones are under the keep-alive timer until they are whole."""
        super().connection_made(transport)
        self._start_timer(self._head_timeout_s, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.head_has_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._answer_probe is not None:
            if self._is_answered(data, self._answer_probe):
                return
            self._answer_probe = None
            if self._last_probe_s:
                self._start_timer(self._head_timeout_s, self.force_close)
        super().data_received(data)

    @property
    def is_idle(self) -> bool:
        """No request is in progress: the head of the next one has not arrived, or not all of it."""
        waiter = self._waiter  # set while aiohttp's handler waits for a head
        return waiter is not None and not waiter.done()

    def head_has_arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_answered(self, data: bytes, answer_probe: Callable[[bytes], bytes | None]) -> bool:
        transport = self.transport
        # A client that does not read its answers is left to aiohttp, which waits before it writes more.
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        answer = answer_probe(data)
        if answer is None:
            return False
        transport.write(answer)
        if not self._last_probe_s:
            self.keep_alive(True)  # stops aiohttp's timer until its next request
            self._start_timer(self.keepalive_timeout, self._close_if_idle)
        self._last_probe_s = asyncio.get_running_loop().time()
        return True

    def _close_if_idle(self) -> None:
        idle_s = asyncio.get_running_loop().time() - self._last_probe_s
        if idle_s >= self.keepalive_timeout:
            self.force_close()
        else:
            self._start_timer(self.keepalive_timeout - idle_s, self._close_if_idle)

    def _start_timer(self, delay_s: float, action: Callable[[], None]) -> None:
        self.head_has_arrived()
        self._timer = asyncio.get_running_loop().call_later(delay_s, action)

    def log_exception(self, *args: Any, **keywords: Any) -> None:
        """A body that turns out to be broken behind its answer is the client's fault, not one to be logged."""
        if isinstance(keywords.get("exc_info"), web.RequestPayloadError):
            self.log_debug(*args, **keywords)
        else:
            super().log_exception(*args, **keywords)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that no handler saw (or whose handler failed behind the middleware)."""
        if status >= 500 and not isinstance(exc, ConnectionError):  # that is a client who has left
            logger.error("error while handling a request", exc_info=exc)
        if request.writer is not None and request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; it cannot become an error any more")
        text = "The server had an error." if status >= 500 else f"The request is not valid HTTP: {message or exc}"
        headers = {"X-Request-Id": new_request_id()}
        response = web.Response(
            status=status, body=error_body(status, text), content_type="application/json", headers=headers
        )
        response.force_close()
        return response
