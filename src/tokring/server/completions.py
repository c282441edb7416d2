"""POST /v1/completions: text or token ids in, text out."""

from aiohttp import web

from tokring.sampling_params import SamplingParams
from tokring.server.answer import answer_generation
from tokring.server.answer_head import new_answer_head
from tokring.server.api_types import CompletionRequest
from tokring.server.completion_answer import CompletionAnswer
from tokring.server.errors import invalid_request, unsupported
from tokring.server.front_end import FrontEnd
from tokring.server.generation import Prompt
from tokring.server.generation_request import (
    check_prompt_chars,
    check_prompt_ids,
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
from tokring.server.unsupported_fields import refuse_unsupported_fields

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 1024


async def completions(request: web.Request) -> web.StreamResponse:
    """The handler."""
    front_end = request.app[FRONT_END]
    front_end.check_ready()
    with front_end:
        body = await read_body(request, CompletionRequest)
        return await complete(request, front_end, body)


async def complete(request: web.Request, front_end: FrontEnd, body: CompletionRequest) -> web.StreamResponse:
    """Answers a decoded completion request. Raises ApiError."""
    model = front_end.resolve_model(body.model)
    refuse_unsupported_fields(body)
    echo_only = bool(body.echo) and body.max_tokens == 0
    params = await _params(body, front_end, echo_only)
    prompts = await _prompts(body, params, front_end)
    answer = CompletionAnswer(
        head=new_answer_head(request, "cmpl-", model, body),
        table=front_end.model.table,
        num_choices=params.n,
        echo=bool(body.echo),
        echo_only=echo_only,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )
    options = text_options_of(body, front_end, params, LogprobStyle.COMPLETIONS)
    return await answer_generation(request, front_end, body, prompts, options, answer)


async def _params(body: CompletionRequest, front_end: FrontEnd, echo_only: bool) -> SamplingParams:
    check_stream_options(body)
    compares = body.best_of is not None and body.best_of != (1 if body.n is None else body.n)
    if compares and body.stream:
        raise unsupported("best_of", "choices cannot be compared while they are streamed.")
    if echo_only and body.stream:
        raise unsupported("max_tokens", "0 (an echo only) is not streamed.")
    constraint = await structured_output_of(body)
    echoed_logprobs = body.logprobs if body.echo else None
    return await sampling_params_of(
        body,
        front_end,
        max_tokens=1 if echo_only else body.max_tokens,
        logprobs=body.logprobs if body.logprobs is not None or not compares else 0,
        prompt_logprobs=body.prompt_logprobs if body.prompt_logprobs is not None else echoed_logprobs,
        structured_output=constraint,
    )


async def _prompts(body: CompletionRequest, params: SamplingParams, front_end: FrontEnd) -> list[Prompt]:
    """The prompts as token ids, in order. Raises ApiError for what is no prompt, empty, or too long."""
    given = _prompt_list(body)
    default = front_end.model.default_max_tokens or DEFAULT_MAX_TOKENS
    encoder, limits = front_end.model.encoder, front_end.limits
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    for text in texts:
        check_prompt_chars(len(text), encoder, limits, "prompt")
    encoded = iter(await encoder.encode_texts(texts, add_special_tokens=body.add_special_tokens is not False))
    prompts = []
    for prompt in given:
        token_ids = next(encoded) if isinstance(prompt, str) else prompt
        check_prompt_ids(token_ids, limits)
        token_ids = truncated(token_ids, body, limits)
        if not token_ids:
            raise invalid_request("prompt: a prompt must have at least one token.", "prompt")
        echoed: str | None = None
        if body.echo:
            is_whole_text = isinstance(prompt, str) and body.truncate_prompt_tokens is None
            echoed = str(prompt) if is_whole_text else await encoder.decode(token_ids)
        fitted = with_max_tokens(params, len(token_ids), limits, "prompt", default)
        prompts.append(Prompt(token_ids, fitted, echoed))
    return prompts


def _prompt_list(body: CompletionRequest) -> list[str | list[int]]:
    """One text, one list of ids, or a list of either, as a list."""
    prompt = body.prompt
    if prompt is None:
        raise invalid_request("prompt is missing.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid_request("prompt must not be empty.", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > MAX_PROMPTS:
        raise invalid_request(f"prompt is a list of {len(prompt)}; at most {MAX_PROMPTS} are allowed.", "prompt")
    if any(isinstance(item, int) for item in prompt):
        raise invalid_request("prompt mixes token ids with texts or lists.", "prompt")
    return prompt  # type: ignore[return-value]
