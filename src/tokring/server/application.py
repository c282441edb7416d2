"""create_app: the routes of the front end."""

from aiohttp import hdrs, web

from tokring.server import admin, generate, health, invocations, metrics, models, tokenize
from tokring.server.chat_completions import chat_completions, render_chat
from tokring.server.completions import completions
from tokring.server.front_end import FrontEnd
from tokring.server.middleware import FRONT_END, Handler, add_common_headers, expect, guard
from tokring.server.openapi import openapi
from tokring.server.state_probes import STATE_PROBES


def create_app(front_end: FrontEnd) -> web.Application:
    """The whole HTTP interface; needs no loaded model: handlers answer 503 until there is one."""
    app = web.Application(middlewares=[guard], client_max_size=front_end.config.server.max_body_bytes)
    app[FRONT_END] = front_end
    app.on_response_prepare.append(add_common_headers)
    _add_route(app, "POST", "/v1/chat/completions", chat_completions)
    _add_route(app, "POST", "/v1/chat/completions/render", render_chat)
    _add_route(app, "POST", "/v1/completions", completions)
    _add_route(app, "POST", "/inference/v1/generate", generate.generate)
    _add_route(app, "POST", "/invocations", invocations.invocations)
    _add_route(app, "POST", "/tokenize", tokenize.tokenize)
    _add_route(app, "POST", "/detokenize", tokenize.detokenize)
    _add_route(app, "GET", "/v1/models", models.list_models)
    _add_route(app, "GET", "/v1/models/{id:.+}", models.get_model)
    for path in STATE_PROBES:
        _add_route(app, "GET", path, health.state_probe)
    _add_route(app, "POST", "/ping", health.state_probe)
    _add_route(app, "GET", "/version", health.version)
    _add_route(app, "GET", "/load", health.load)
    _add_route(app, "GET", "/metrics", metrics.metrics)
    _add_route(app, "GET", "/openapi.json", openapi)
    if front_end.config.server.admin_routes:
        _add_route(app, "POST", "/pause", admin.pause)
        _add_route(app, "POST", "/resume", admin.resume)
        _add_route(app, "GET", "/is_paused", admin.is_paused)
        _add_route(app, "POST", "/reset_prefix_cache", admin.reset_prefix_cache)
    return app


def _add_route(app: web.Application, method: str, path: str, handler: Handler) -> None:
    """A route; GET answers HEAD too."""
    if method == hdrs.METH_GET:
        app.router.add_get(path, handler, expect_handler=expect)
    else:
        app.router.add_route(method, path, handler, expect_handler=expect)
