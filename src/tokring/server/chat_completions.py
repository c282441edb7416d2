"""POST /v1/chat/completions, and the rendering of its prompt alone."""

import orjson
from aiohttp import web

from tokring.sampling_params import MAX_LENGTH, SamplingParams
from tokring.server.answer import answer_generation
from tokring.server.answer_head import new_answer_head
from tokring.server.api_types import ChatCompletionRequest, ChatFields
from tokring.server.chat_answer import ChatAnswer
from tokring.server.chat_template import ChatTemplateError
from tokring.server.conversation import conversation_of
from tokring.server.errors import invalid_request, unsupported
from tokring.server.front_end import FrontEnd
from tokring.server.generation import Prompt
from tokring.server.generation_request import (
    check_prompt_chars,
    refuse_best_of,
    sampling_params_of,
    text_options_of,
    truncated,
    with_max_tokens,
)
from tokring.server.middleware import FRONT_END
from tokring.server.request_body import read_body
from tokring.server.stream_options import check_stream_options
from tokring.server.structured_output import structured_output_of
from tokring.server.token_path import LogprobStyle
from tokring.server.tools import ToolUse, tool_use_of
from tokring.server.unsupported_fields import refuse_unsupported_fields

MAX_METADATA_ENTRIES = 16


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """The handler."""
    front_end = request.app[FRONT_END]
    front_end.check_ready()
    with front_end:
        body = await read_body(request, ChatCompletionRequest)
        return await chat_complete(request, front_end, body)


async def render_chat(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/render: the prompt that a chat completion would be given, as text and token ids."""
    front_end = request.app[FRONT_END]
    front_end.check_ready()
    body = await read_body(request, ChatCompletionRequest)
    front_end.resolve_model(body.model)
    refuse_unsupported_fields(body)
    tool_use = await tool_use_of(body)
    await _params(body, tool_use, front_end)
    token_ids = await encode_chat(body, tool_use, front_end)
    template = front_end.model.encoder.chat_template
    text = await front_end.model.encoder.render_conversation(conversation_of(body, tool_use.definitions, template))
    rendered = {"prompt": text, "prompt_token_ids": token_ids, "max_model_len": front_end.limits.max_model_len}
    return web.Response(body=orjson.dumps(rendered), content_type="application/json")


async def chat_complete(request: web.Request, front_end: FrontEnd, body: ChatCompletionRequest) -> web.StreamResponse:
    """Answers a decoded chat request. Raises ApiError."""
    model = front_end.resolve_model(body.model)
    refuse_unsupported_fields(body)
    tool_use = await tool_use_of(body)
    params = await _params(body, tool_use, front_end)
    token_ids = await encode_chat(body, tool_use, front_end)
    default = front_end.model.default_max_tokens
    prompt = Prompt(token_ids, with_max_tokens(params, len(token_ids), front_end.limits, "messages", default))
    answer = ChatAnswer(
        head=new_answer_head(request, "chatcmpl-", model, body),
        table=front_end.model.table,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs is not None,
        new_parser=tool_use.new_parser,
        reports_tool_calls=not tool_use.is_named,
    )
    is_parsed = tool_use.new_parser is not None
    options = text_options_of(body, front_end, params, LogprobStyle.CHAT, deltas=is_parsed and bool(body.stream))
    return await answer_generation(request, front_end, body, [prompt], options, answer)


async def encode_chat(body: ChatFields, tool_use: ToolUse, front_end: FrontEnd) -> list[int]:
    """Token ids of the rendered conversation. Raises ApiError."""
    encoder, limits = front_end.model.encoder, front_end.limits
    conversation = conversation_of(body, tool_use.definitions, encoder.chat_template)
    num_chars = sum(len(message["content"]) for message in conversation.messages)
    check_prompt_chars(num_chars, encoder, limits, "messages")
    try:
        token_ids = await encoder.encode_conversation(conversation)
    except ChatTemplateError as error:
        raise invalid_request(str(error), "messages") from None
    token_ids = truncated(token_ids, body, limits)
    if not token_ids:
        raise invalid_request("messages: the rendered prompt has no token.", "messages")
    return token_ids


async def _params(body: ChatCompletionRequest, tool_use: ToolUse, front_end: FrontEnd) -> SamplingParams:
    _check_fields(body)
    constraint = await structured_output_of(body)
    if constraint is not None and tool_use.constraint is not None:
        raise invalid_request("tool_choice asks for a call, which a constrained answer cannot be.", "tool_choice")
    return await sampling_params_of(
        body,
        front_end,
        max_tokens=_max_tokens(body),
        logprobs=_logprobs(body, front_end.limits.max_logprobs),
        prompt_logprobs=body.prompt_logprobs,
        structured_output=constraint or tool_use.constraint or tool_use.call_constraint,
    )


def _check_fields(body: ChatCompletionRequest) -> None:
    check_stream_options(body)
    refuse_best_of(body, "it is a field of /v1/completions.")
    if body.echo:
        raise unsupported("echo", "it is a field of /v1/completions.")
    if body.chat_template is not None:
        raise unsupported(
            "chat_template", "templates of clients are not run; the server has its own (--chat-template)."
        )
    if body.add_special_tokens:
        raise unsupported("add_special_tokens", "the chat template adds the special tokens.")
    if body.metadata is not None and len(body.metadata) > MAX_METADATA_ENTRIES:
        raise invalid_request(f"metadata has more than {MAX_METADATA_ENTRIES} entries.", "metadata")


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    """max_completion_tokens goes before the older max_tokens."""
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_completion_tokens < 1:
        raise invalid_request("max_completion_tokens must be at least 1.", "max_completion_tokens")
    return min(body.max_completion_tokens, MAX_LENGTH)


def _logprobs(body: ChatCompletionRequest, most: int) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise invalid_request("top_logprobs needs logprobs: true.", "top_logprobs")
    if not body.logprobs:
        return None
    count = body.top_logprobs or 0
    if not 0 <= count <= most:
        raise invalid_request(f"top_logprobs must be between 0 and {most}, got {count}.", "top_logprobs")
    return count
