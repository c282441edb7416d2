"""GET /v1/models and /v1/models/{id}."""

from typing import Any

import orjson
from aiohttp import web

from tokring.server.errors import model_not_found
from tokring.server.front_end import FrontEnd
from tokring.server.middleware import FRONT_END


async def list_models(request: web.Request) -> web.Response:
    front_end = request.app[FRONT_END]
    front_end.check_ready()
    cards = [_card(name, front_end) for name in front_end.model_names]
    return web.Response(body=orjson.dumps({"object": "list", "data": cards}), content_type="application/json")


async def get_model(request: web.Request) -> web.Response:
    front_end = request.app[FRONT_END]
    front_end.check_ready()
    name = request.match_info["id"]
    if name not in front_end.model_names:
        raise model_not_found(name)
    return web.Response(body=orjson.dumps(_card(name, front_end)), content_type="application/json")


def _card(name: str, front_end: FrontEnd) -> dict[str, Any]:
    created = front_end.model.created
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tokring",
        "root": front_end.config.model.model or front_end.model.name,
        "parent": None,
        "max_model_len": front_end.limits.max_model_len,
        "permission": [permission],
    }
