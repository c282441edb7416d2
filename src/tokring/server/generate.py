"""POST /inference/v1/generate: token ids in, token ids out, as vLLM's disaggregated front ends speak."""

from typing import Any

import msgspec
import orjson
from aiohttp import web

from tokring.server.answer import answer_generation
from tokring.server.answer_head import new_answer_head
from tokring.server.api_types import GenerationFields, StreamOptions
from tokring.server.completion_answer import CompletionAnswer
from tokring.server.errors import invalid_request, unsupported
from tokring.server.generation import Outcome, Prompt
from tokring.server.generation_request import (
    check_prompt_ids,
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
from tokring.server.unsupported_fields import refuse_unsupported_fields


class SamplingFields(GenerationFields, kw_only=True):
    """vLLM's sampling_params object."""

    logprobs: int | None = None
    detokenize: bool | None = None  # either way: token ids are all there is
    output_kind: int | None = None
    flat_logprobs: bool | None = None
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    skip_reading_prefix_cache: bool | None = None
    trace_decode_token_ids: list[int] | None = None
    extra_args: Any = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: SamplingFields = msgspec.field(default_factory=SamplingFields)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    features: Any = None
    kv_transfer_params: Any = None


class _GenerateAnswer(CompletionAnswer):
    """Like a completion, with token ids in place of the text."""

    def body(self, outcomes: Any, usage: dict[str, Any]) -> dict[str, Any]:
        choices = [self._ids_choice(index, outcome) for index, outcome in enumerate(outcomes)]
        body: dict[str, Any] = {"request_id": self.head.id, "model": self.head.model}
        body.update(choices=choices, usage=usage)
        if self.prompt_logprobs:
            body["prompt_logprobs"] = self._prompt_table(outcomes[0].choice).as_prompt_logprobs()
        return body

    def _ids_choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        return {
            "index": index,
            "token_ids": outcome.token_ids,
            "logprobs": orjson.loads(outcome.logprobs) if outcome.logprobs is not None else None,
            "finish_reason": outcome.finish_reason,
            "stop_reason": outcome.stop_reason,
        }


async def generate(request: web.Request) -> web.StreamResponse:
    """The handler."""
    front_end = request.app[FRONT_END]
    front_end.check_ready()
    with front_end:
        body = await read_body(request, GenerateRequest)
        fields = body.sampling_params
        fields.stream, fields.stream_options = body.stream, body.stream_options
        fields.request_id, fields.return_token_ids = body.request_id, True
        for name in ("cache_salt", "priority"):
            if getattr(body, name) is not None:
                setattr(fields, name, getattr(body, name))
        for name in ("features", "kv_transfer_params"):
            if getattr(body, name) is not None:
                raise unsupported(name, "requests are token ids only.")
        model = front_end.resolve_model(body.model)
        refuse_unsupported_fields(fields)
        refuse_best_of(fields, "all choices are answered.")
        check_stream_options(fields)
        check_prompt_ids(body.token_ids, front_end.limits, "token_ids")
        if not body.token_ids:
            raise invalid_request("token_ids must not be empty.", "token_ids")
        params = await sampling_params_of(
            fields,
            front_end,
            max_tokens=fields.max_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=fields.prompt_logprobs,
            structured_output=await structured_output_of(fields),
        )
        token_ids = truncated(body.token_ids, fields, front_end.limits)
        prompt = Prompt(token_ids, with_max_tokens(params, len(token_ids), front_end.limits, "token_ids"))
        answer = _GenerateAnswer(
            head=new_answer_head(request, "", model, fields),
            table=front_end.model.table,
            num_choices=params.n,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs is not None,
        )
        options = text_options_of(fields, front_end, params, LogprobStyle.CHAT)
        return await answer_generation(request, front_end, fields, [prompt], options, answer)
