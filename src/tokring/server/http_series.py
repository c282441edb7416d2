"""Indices of the http_* series in the stats page: the same in every front end, whoever renders /metrics."""

from aiohttp import hdrs, web

HANDLERS = (
    "none",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{id}",
    "/inference/v1/generate",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/openapi.json",
    "/pause",
    "/resume",
    "/is_paused",
    "/reset_prefix_cache",
)
METHODS = (hdrs.METH_GET, hdrs.METH_POST, hdrs.METH_DELETE, "other")
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx", "other")
_HANDLER_INDEX = {handler: index for index, handler in enumerate(HANDLERS)}


def handler_index(request: web.Request) -> int:
    """Index of the route template; 0 ("none") for what has no route. Never a raw path."""
    resource = request.match_info.route.resource
    return _HANDLER_INDEX.get(resource.canonical, 0) if resource is not None else 0


def method_index(method: str) -> int:
    return METHODS.index(method) if method in METHODS else len(METHODS) - 1


def status_index(status: int) -> int:
    return status // 100 - 2 if 200 <= status < 600 else len(STATUS_CLASSES) - 1


def pair_index(handler: int, method: int) -> int:
    """Index of a (handler, method) histogram instance."""
    return handler * len(METHODS) + method


def series_index(handler: int, method: int, status: int) -> int:
    """Index of a (handler, method, status class) counter."""
    return pair_index(handler, method) * len(STATUS_CLASSES) + status
