"""The routes of --admin-routes: pause, resume and the prefix cache's reset, as vLLM spells them."""

import asyncio

import orjson
from aiohttp import web

from tokring.server.errors import ApiError, unavailable, unsupported
from tokring.server.middleware import FRONT_END
from tokring_ipc import CallRefused, ControlMethod

# vLLM's query parameters: the value that asks for what happens here (None: none does), and what does.
_QUERY = {
    "mode": ("keep", "running requests keep their state (mode=keep)."),
    "wait_for_inflight_requests": (None, "running requests keep their state (mode=keep)."),
    "clear_cache": ("false", "the cache is emptied by POST /reset_prefix_cache."),
    "reset_external": ("false", "there is no external cache."),
}


async def pause(request: web.Request) -> web.Response:
    """Nothing is computed until resume(), whichever front end is asked; running requests keep their state."""
    return await _ask_engine(request, ControlMethod.PAUSE, "paused")


async def resume(request: web.Request) -> web.Response:
    return await _ask_engine(request, ControlMethod.RESUME, "resumed")


async def reset_prefix_cache(request: web.Request) -> web.Response:
    return await _ask_engine(request, ControlMethod.RESET_PREFIX_CACHE, "reset")


async def is_paused(request: web.Request) -> web.Response:
    """As the stats page says: the engine need not answer."""
    paused = any(page.get("paused") for page in request.app[FRONT_END].pages.engines)
    return web.Response(body=orjson.dumps({"is_paused": paused}), content_type="application/json")


async def _ask_engine(request: web.Request, method: ControlMethod, status: str) -> web.Response:
    """`status` is the answer once it is so. During a drain too: a resume helps it. Raises ApiError."""
    for name, value in request.query.items():
        if name in _QUERY and value.lower() != _QUERY[name][0]:
            raise unsupported(name, _QUERY[name][1])
    front_end = request.app[FRONT_END]
    if not front_end.has_model:
        front_end.check_ready()
    try:
        async with asyncio.timeout(front_end.config.engine.step_timeout):
            await front_end.engine.call(method)
    except CallRefused as error:  # a replayed recording
        raise ApiError(501, f"{str(error).capitalize()}.") from None
    except OSError:  # it is gone, hangs, or reads no calls
        raise unavailable("The engine does not answer.") from None
    return web.Response(body=orjson.dumps({"status": status}), content_type="application/json")
