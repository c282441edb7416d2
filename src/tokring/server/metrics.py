"""GET /metrics: Prometheus text from the stats pages of all processes; names and labels of contracts/METRICS.md."""

from aiohttp import web

from tokring.server.metrics_text import MetricsText
from tokring.server.middleware import FRONT_END


async def metrics(request: web.Request) -> web.Response:
    front_end = request.app[FRONT_END]
    pages = front_end.pages
    max_model_len = max((page.get("max_model_len") for page in pages.engines), default=0)
    text = _text_for(front_end.model_names[0], max_model_len)
    return web.Response(body=text.render(pages), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


_texts: dict[tuple[str, int], MetricsText] = {}


def _text_for(model_name: str, max_model_len: int) -> MetricsText:
    """Made anew only when the model's name or its context length became known."""
    key = (model_name, max_model_len)
    if key not in _texts:
        _texts.clear()
        _texts[key] = MetricsText(model_name, max_model_len)
    return _texts[key]
