"""GET /openapi.json: made once from the request structs."""

import functools
from typing import Any

import msgspec
import orjson
from aiohttp import web

from tokring.server.api_types import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tokring.server.generate import GenerateRequest
from tokring.server.middleware import FRONT_END

_POSTS: dict[str, tuple[tuple[type, ...], str]] = {
    "/v1/chat/completions": ((ChatCompletionRequest,), "Create a chat completion"),
    "/v1/chat/completions/render": ((ChatCompletionRequest,), "Render a chat prompt"),
    "/v1/completions": ((CompletionRequest,), "Create a completion"),
    "/inference/v1/generate": ((GenerateRequest,), "Generate token ids from token ids"),
    "/invocations": ((ChatCompletionRequest, CompletionRequest), "Create whichever of both the body asks for"),
    "/tokenize": ((TokenizeRequest,), "Tokenize a prompt or a conversation"),
    "/detokenize": ((DetokenizeRequest,), "Turn token ids into text"),
}
_GETS = {
    "/v1/models": "List the served models",
    "/v1/models/{id}": "Describe a served model",
    "/health": "Whether requests can be served now",
    "/health/live": "Whether the process lives",
    "/health/ready": "Whether requests can be served now",
    "/health/started": "Whether start-up has ended",
    "/ping": "Alias of /health",
    "/version": "The server's version",
    "/load": "Requests in progress",
    "/metrics": "Prometheus metrics",
    "/openapi.json": "This document",
}
_ADMIN_GETS = {"/is_paused": "Whether the engine is paused"}
_ADMIN_POSTS = {
    "/pause": "Compute nothing until /resume",
    "/resume": "Go on after /pause",
    "/reset_prefix_cache": "Forget the prefix cache",
}


async def openapi(request: web.Request) -> web.Response:
    has_admin_routes = request.app[FRONT_END].config.server.admin_routes
    return web.Response(body=_document(has_admin_routes), content_type="application/json")


@functools.cache
def _document(has_admin_routes: bool) -> bytes:
    kinds = {kind for kinds, _ in _POSTS.values() for kind in kinds}
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    gets, bare_posts = _GETS, {"/ping": _GETS["/ping"]}
    if has_admin_routes:
        gets, bare_posts = gets | _ADMIN_GETS, bare_posts | _ADMIN_POSTS
    paths: dict[str, Any] = {path: {"get": _operation(summary)} for path, summary in gets.items()}
    for path, summary in bare_posts.items():
        paths.setdefault(path, {})["post"] = _operation(summary)
    for path, (kinds_of_path, summary) in _POSTS.items():
        schema = {"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds_of_path]}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {**_operation(summary), "requestBody": body}}
    model_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{id}"]["parameters"] = [model_id]
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "tokring", "version": "1"},
            "paths": paths,
            "components": {"schemas": components},
        }
    )


def _operation(summary: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": {"description": "OK"}, "default": {"description": "An error object"}},
    }
