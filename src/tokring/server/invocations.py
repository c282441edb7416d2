"""POST /invocations: SageMaker's one route; the body says which request it is."""

from aiohttp import web

from tokring.server.api_types import ChatCompletionRequest, CompletionRequest
from tokring.server.chat_completions import chat_complete
from tokring.server.completions import complete
from tokring.server.errors import invalid_request
from tokring.server.middleware import FRONT_END
from tokring.server.request_body import convert, read_object


async def invocations(request: web.Request) -> web.StreamResponse:
    """A chat completion if there are messages, a completion if there is a prompt."""
    front_end = request.app[FRONT_END]
    front_end.check_ready()
    with front_end:
        body = await read_object(request)
        if "messages" in body:
            return await chat_complete(request, front_end, convert(body, ChatCompletionRequest))
        if "prompt" in body:
            return await complete(request, front_end, convert(body, CompletionRequest))
    raise invalid_request("messages or prompt is needed.", "messages")
