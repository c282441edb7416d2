"""GET /metrics: Prometheus text from the stats pages of all processes; names and labels of contracts/METRICS.md."""

import functools

from aiohttp import web

from tokring.server.front_end import FrontEnd
from tokring.server.metrics_text import MetricsText
from tokring.server.middleware import FRONT_END

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=metrics_body(request.app[FRONT_END]), headers={"Content-Type": CONTENT_TYPE})


def metrics_body(front_end: FrontEnd) -> bytes:
    """The text as of now."""
    pages = front_end.pages
    max_model_len = max((page.get("max_model_len") for page in pages.engines), default=0)
    return _text_for(front_end.model_names[0], max_model_len, front_end.config.engine.kv_cache_dtype).render(pages)


@functools.lru_cache(maxsize=1)
def _text_for(model_name: str, max_model_len: int, kv_cache_dtype: str) -> MetricsText:
    """Made anew only when the context length became known."""
    return MetricsText(model_name, max_model_len, kv_cache_dtype)
