"""Listening: aiohttp on inherited sockets, with our error object also for what is no HTTP at all."""

import asyncio
import socket
import ssl
from collections.abc import Sequence

from aiohttp import web

from tokring.config import ServerSettings
from tokring.server.http_connection import HttpConnection
from tokring.server.middleware import FRONT_END
from tokring.server.plain_probes import PlainProbes

LISTEN_BACKLOG = 2048
# Bounds what a client that does not read costs in kernel memory; the rest waits in the token path, which has limits.
SEND_BUFFER_BYTES = 256 * 1024
TCP_USER_TIMEOUT_MS = 30_000
SHUTDOWN_TIMEOUT_S = 2.0


class Listener:
    """The HTTP side of the process: started with open(), ended with close()."""

    def __init__(self, app: web.Application, settings: ServerSettings) -> None:
        self._settings = settings
        self._answer_probe = PlainProbes(app[FRONT_END]).answer
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=settings.timeout_keep_alive,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
        self._servers: list[asyncio.Server] = []
        self._times_idle: dict[HttpConnection, int] = {}  # in calls of close_idle() in a row

    @property
    def uses_tls(self) -> bool:
        return self._settings.ssl_certfile is not None

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Accepts connections from now on."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        context = tls_context(self._settings)
        for listening in sockets:
            tune(listening)
            server = await loop.create_server(self._new_protocol, sock=listening, ssl=context, backlog=LISTEN_BACKLOG)
            self._servers.append(server)

    def stop_accepting(self) -> None:
        """Connections that nobody has accepted wait for the other processes that listen on the same sockets."""
        for server in self._servers:
            server.close()
        self._servers = []

    def close_idle(self, num_calls: int) -> int:
        """Ends the connections that have been without a request in so many calls of this in a row.

        Calls are counted, not seconds: requests that came while this process could not run are read between two calls.
        Returns how many connections there are, those included.
        """
        connections = self._runner.server.connections if self._runner.server is not None else []
        idle = [each for each in connections if isinstance(each, HttpConnection) and each.is_idle]
        self._times_idle = {each: self._times_idle.get(each, 0) + 1 for each in idle}
        for connection, times in self._times_idle.items():
            if times >= num_calls:
                connection.force_close()
        return len(connections)

    async def close(self) -> None:
        """Stops accepting and ends every connection."""
        self.stop_accepting()
        await self._runner.cleanup()

    def _new_protocol(self) -> web.RequestHandler:
        server = self._runner.server
        assert server is not None
        return HttpConnection(
            server,
            answer_probe=self._answer_probe,
            head_timeout_s=self._settings.request_timeout,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=self._settings.timeout_keep_alive,
            access_log=None,  # off
            auto_decompress=False,  # see content_encoding.py
        )


def tune(listening: socket.socket) -> None:
    """Options that accepted connections inherit."""
    listening.setblocking(False)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if listening.family in (socket.AF_INET, socket.AF_INET6):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """None without a certificate."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.ssl_ca_certs)
    context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    if settings.ssl_ca_certs is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context
