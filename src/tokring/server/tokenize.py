"""POST /tokenize and /detokenize, as vLLM has them."""

import orjson
from aiohttp import web

from tokring.server.api_types import ChatFields, DetokenizeRequest, TokenizeRequest
from tokring.server.chat_completions import encode_chat
from tokring.server.errors import invalid_request, unsupported
from tokring.server.generation_request import check_prompt_ids
from tokring.server.middleware import FRONT_END
from tokring.server.request_body import read_body
from tokring.server.tools import tool_use_of
from tokring.server.unsupported_fields import refuse_unsupported_fields

MAX_CHARS = 2_000_000  # some seconds of a tokenizer's thread, of which there are few


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a prompt or a conversation: {count, max_model_len, tokens, token_strs}."""
    front_end = request.app[FRONT_END]
    front_end.check_ready()
    body = await read_body(request, TokenizeRequest)
    front_end.resolve_model(body.model)
    refuse_unsupported_fields(body)
    encoder = front_end.model.encoder
    if body.chat_template is not None:
        raise unsupported("chat_template", "templates of clients are not run.")
    if (body.prompt is None) == (body.messages is None):
        raise invalid_request("Exactly one of prompt and messages is needed.", "prompt")
    if body.prompt is not None:
        if len(body.prompt) > MAX_CHARS:
            raise invalid_request(f"prompt is longer than {MAX_CHARS} characters.", "prompt")
        [token_ids] = await encoder.encode_texts([body.prompt], add_special_tokens=body.add_special_tokens is not False)
    else:
        chat = _chat_fields(body)
        token_ids = await encode_chat(chat, await tool_use_of(chat), front_end)
    answer = {
        "count": len(token_ids),
        "max_model_len": front_end.limits.max_model_len,
        "tokens": token_ids,
        "token_strs": await encoder.token_strings(token_ids) if body.return_token_strs else None,
    }
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids: {prompt}."""
    front_end = request.app[FRONT_END]
    front_end.check_ready()
    body = await read_body(request, DetokenizeRequest)
    front_end.resolve_model(body.model)
    check_prompt_ids(body.tokens, front_end.limits, "tokens")
    text = await front_end.model.encoder.decode(body.tokens)
    return web.Response(body=orjson.dumps({"prompt": text}), content_type="application/json")


def _chat_fields(body: TokenizeRequest) -> ChatFields:
    if body.add_special_tokens:
        raise unsupported("add_special_tokens", "the chat template adds the special tokens.")
    return ChatFields(
        messages=body.messages or [],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
