"""Probes. They read stats pages and flags only: no lock, no engine, whatever else goes on."""

import functools
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version

import orjson
from aiohttp import web

from tokring.server.front_end import FrontEnd, Phase
from tokring.server.middleware import FRONT_END

_HEALTHY = b'{"status":"ok"}'


async def health(request: web.Request) -> web.Response:
    """200 while requests can be served; else 503 with the reason: loading, draining, hung or dead."""
    reason = why_unhealthy(request.app[FRONT_END])
    if reason is None:
        return web.Response(body=_HEALTHY, content_type="application/json")
    return _unavailable(reason)


async def live(request: web.Request) -> web.Response:
    """200 as long as this process answers and its engine is not lost: a restart would help otherwise."""
    front_end = request.app[FRONT_END]
    if front_end.phase is Phase.ENGINE_DEAD:
        return _unavailable("the engine is dead")
    return web.Response(body=_HEALTHY, content_type="application/json")


async def started(request: web.Request) -> web.Response:
    """200 once start-up has ended, whatever came after."""
    phase = request.app[FRONT_END].phase
    if phase in (Phase.READY, Phase.DRAINING, Phase.ENGINE_RESTARTING, Phase.ENGINE_DEAD):
        return web.Response(body=_HEALTHY, content_type="application/json")
    return _unavailable(str(phase))


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


def why_unhealthy(front_end: FrontEnd) -> str | None:
    if front_end.phase is not Phase.READY:
        return str(front_end.phase)
    return front_end.pages.why_engine_is_unhealthy(front_end.config.engine.step_timeout)


def _unavailable(reason: str) -> web.Response:
    body = orjson.dumps({"status": "unavailable", "reason": reason})
    return web.Response(status=503, body=body, content_type="application/json", headers={"Retry-After": "2"})
