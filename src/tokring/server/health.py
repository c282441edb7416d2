"""Handlers of the probes."""

import functools
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version

import orjson
from aiohttp import web

from tokring.server.middleware import FRONT_END
from tokring.server.state_probes import RETRY_AFTER_S, STATE_PROBES, probe_body


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
