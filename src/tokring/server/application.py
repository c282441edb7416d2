"""create_app: the routes of the front end."""

from aiohttp import web

from tokring.server import generate, health, invocations, metrics, models, tokenize
from tokring.server.chat_completions import chat_completions, render_chat
from tokring.server.completions import completions
from tokring.server.front_end import FrontEnd
from tokring.server.middleware import FRONT_END, add_common_headers, guard
from tokring.server.openapi import openapi


def create_app(front_end: FrontEnd) -> web.Application:
    """The whole HTTP interface; needs no loaded model: handlers answer 503 until there is one."""
    app = web.Application(middlewares=[guard], client_max_size=front_end.config.server.max_body_bytes)
    app[FRONT_END] = front_end
    app.on_response_prepare.append(add_common_headers)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/chat/completions/render", render_chat)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/inference/v1/generate", generate.generate)
    app.router.add_post("/invocations", invocations.invocations)
    app.router.add_post("/tokenize", tokenize.tokenize)
    app.router.add_post("/detokenize", tokenize.detokenize)
    app.router.add_get("/v1/models", models.list_models)
    app.router.add_get("/v1/models/{id:.+}", models.get_model)
    app.router.add_get("/health", health.health)
    app.router.add_get("/health/live", health.live)
    app.router.add_get("/health/ready", health.health)
    app.router.add_get("/health/started", health.started)
    app.router.add_get("/ping", health.health)
    app.router.add_post("/ping", health.health)
    app.router.add_get("/version", health.version)
    app.router.add_get("/load", health.load)
    app.router.add_get("/metrics", metrics.metrics)
    app.router.add_get("/openapi.json", openapi)
    return app
