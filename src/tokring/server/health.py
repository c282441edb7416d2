"""Probes. They read stats pages and flags only: no lock, no engine, whatever else goes on."""

import functools
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version

import orjson
from aiohttp import web

from tokring.server.front_end import FrontEnd, Phase
from tokring.server.middleware import FRONT_END

_OK = b'{"status":"ok"}'
RETRY_AFTER_S = "2"


def why_unhealthy(front_end: FrontEnd) -> str | None:
    """Why requests can't be served: loading, draining, hung or dead; None if they can."""
    if front_end.phase is not Phase.READY:
        return str(front_end.phase)
    return front_end.pages.why_engine_is_unhealthy(front_end.config.engine.step_timeout)


def why_not_alive(front_end: FrontEnd) -> str | None:
    """None as long as this process answers and its engine is not lost: a restart would help otherwise."""
    return "the engine is dead" if front_end.phase is Phase.ENGINE_DEAD else None


def why_not_started(front_end: FrontEnd) -> str | None:
    """None once start-up has ended, whatever came after."""
    ended = front_end.phase in (Phase.READY, Phase.DRAINING, Phase.ENGINE_RESTARTING, Phase.ENGINE_DEAD)
    return None if ended else str(front_end.phase)


# By path: the reason for a 503, or None for a 200.
STATE_PROBES: Mapping[str, Callable[[FrontEnd], str | None]] = {
    "/health": why_unhealthy,
    "/health/live": why_not_alive,
    "/health/ready": why_unhealthy,
    "/health/started": why_not_started,
    "/ping": why_unhealthy,
}


def probe_body(reason: str | None) -> bytes:
    """The JSON of a state probe's answer."""
    return _OK if reason is None else orjson.dumps({"status": "unavailable", "reason": reason})


async def state_probe(request: web.Request) -> web.Response:
    """The handler of all STATE_PROBES."""
    reason = STATE_PROBES[request.path](request.app[FRONT_END])
    headers = None if reason is None else {"Retry-After": RETRY_AFTER_S}
    status = 200 if reason is None else 503
    return web.Response(status=status, body=probe_body(reason), content_type="application/json", headers=headers)


async def version(request: web.Request) -> web.Response:
    return web.Response(body=orjson.dumps({"version": _version_number()}), content_type="application/json")


@functools.cache
def _version_number() -> str:
    try:
        return package_version("tokring")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0.0.0+source"


async def load(request: web.Request) -> web.Response:
    return web.Response(body=orjson.dumps(request.app[FRONT_END].pages.load()), content_type="application/json")
