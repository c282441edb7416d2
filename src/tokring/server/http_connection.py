"""HttpConnection: one client connection before aiohttp has made a request of its bytes."""

import asyncio
import logging
import secrets
from typing import Any

from aiohttp import web

from tokring.server.errors import error_body

logger = logging.getLogger(__name__)


class HttpConnection(web.RequestHandler):
    """aiohttp's protocol; refuses malformed requests in OpenAI's error shape, and gives up on heads that never end."""

    __slots__ = ("_head_timeout_s", "_head_timer")

    def __init__(self, manager: web.Server, *, head_timeout_s: float, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The first head must arrive in time; later ones are under the keep-alive timer until they are whole."""
        super().connection_made(transport)
        self._head_timer = asyncio.get_running_loop().call_later(self._head_timeout_s, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.head_has_arrived()
        super().connection_lost(exc)

    def head_has_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that no handler saw (or whose handler failed behind the middleware)."""
        if status >= 500:
            logger.error("error while handling a request", exc_info=exc)
        if request.writer is not None and request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; it cannot become an error any more")
        text = "The server had an error." if status >= 500 else f"The request is not valid HTTP: {message or exc}"
        headers = {"X-Request-Id": secrets.token_hex(16)}
        response = web.Response(
            status=status, body=error_body(status, text), content_type="application/json", headers=headers
        )
        response.force_close()
        return response
