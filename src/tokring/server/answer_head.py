"""AnswerHead: what every chunk and body of one answer shares."""

import time
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from tokring.server.api_types import GenerationFields
from tokring.server.generation import Choice
from tokring.server.request_id import answer_id
from tokring.server.stream_options import wants_continuous_usage
from tokring.server.token_path import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """`kind`, below: the object field; chunks of chats have another one than their bodies.

    return_token_ids: chunks and choices bring their ids; continuous_usage: every chunk counts tokens.
    """

    id: str
    created: int
    model: str
    return_token_ids: bool = False
    continuous_usage: bool = False

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, kind: str, choice: Choice, entry: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """A chunk made in Python, when `num_tokens` of the choice are out; `entry`: what is in "choices"."""
        chunk = {**self.fields(kind), "choices": [entry]}
        if self.continuous_usage:
            num_prompt_tokens = len(choice.prompt.token_ids)
            chunk["usage"] = {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt_tokens + num_tokens,
            }
        return chunk

    def template(self, kind: str, choice: Choice, entry: list[bytes | Field]) -> list[bytes | Field]:
        """The same for the token path: `entry` is what is in "choices", without its index and its end."""
        start = orjson.dumps(self.fields(kind))[:-1] + b',"choices":[{"index":%d,' % choice.index
        parts: list[bytes | Field] = [start, *entry]
        if self.return_token_ids:
            parts += [b',"token_ids":', Field.TOKEN_IDS]
        parts.append(b"}]")
        if self.continuous_usage:
            num_prompt_tokens = b"%d" % len(choice.prompt.token_ids)
            parts += [b',"usage":{"prompt_tokens":' + num_prompt_tokens + b',"completion_tokens":']
            parts += [Field.COMPLETION_TOKENS, b',"total_tokens":', Field.TOTAL_TOKENS, b"}"]
        parts.append(b"}")
        return parts


def new_answer_head(request: web.Request, prefix: str, model: str, body: GenerationFields) -> AnswerHead:
    """`prefix`: of the id. Raises ApiError (400) for an odd request_id."""
    return AnswerHead(
        id=answer_id(request, prefix, body.request_id),
        created=int(time.time()),
        model=model,
        return_token_ids=bool(body.return_token_ids),
        continuous_usage=wants_continuous_usage(body),
    )
