"""GET /openapi.json: made once from the request structs."""

import functools
from typing import Any

import msgspec
import orjson
from aiohttp import web

from tokring.server.api_types import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_POSTS = {
    "/v1/chat/completions": (ChatCompletionRequest, "Create a chat completion"),
    "/v1/chat/completions/render": (ChatCompletionRequest, "Render a chat prompt"),
    "/v1/completions": (CompletionRequest, "Create a completion"),
    "/tokenize": (TokenizeRequest, "Tokenize a prompt or a conversation"),
    "/detokenize": (DetokenizeRequest, "Turn token ids into text"),
}
_GETS = {
    "/v1/models": "List the served models",
    "/health": "Whether requests can be served now",
    "/health/live": "Whether the process lives",
    "/health/ready": "Whether requests can be served now",
    "/health/started": "Whether start-up has ended",
    "/ping": "Alias of /health",
    "/version": "The server's version",
    "/load": "Requests in progress",
    "/metrics": "Prometheus metrics",
}


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=_document(), content_type="application/json")


@functools.cache
def _document() -> bytes:
    kinds = [kind for kind, _ in _POSTS.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: {"get": _operation(summary)} for path, summary in _GETS.items()}
    for path, (kind, summary) in _POSTS.items():
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {**_operation(summary), "requestBody": body}}
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
