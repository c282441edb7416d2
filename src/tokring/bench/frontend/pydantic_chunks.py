"""Chunks as pydantic models of the shape that vLLM's server builds for each token.

As there, every model allows unknown fields and has a wrapping validator that looks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator


class OpenAIModel(BaseModel):
    model_config = ConfigDict(extra="allow")
    known_names: ClassVar[set[str] | None] = None

    @model_validator(mode="wrap")
    @classmethod
    def look_for_unknown_fields(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        result = handler(data)
        if not isinstance(data, dict):
            return result
        known = cls.__dict__.get("known_names")
        if known is None:
            known = cls.known_names = set(cls.model_fields)
        if any(name not in known for name in data):
            raise ValueError("unknown fields")
        return result


class TopLogprob(OpenAIModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(OpenAIModel):
    content: list[TokenLogprob] | None = None


class Delta(OpenAIModel):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)


class Choice(OpenAIModel):
    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Chunk(OpenAIModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[Choice]
    usage: dict[str, int] | None = None
    prompt_token_ids: list[int] | None = None


def chunk_of(answer_id: str, created: int, model: str, text: str, logprobs: Logprobs | None = None) -> Chunk:
    choice = Choice(index=0, delta=Delta(content=text), logprobs=logprobs, finish_reason=None)
    return Chunk(id=answer_id, object="chat.completion.chunk", created=created, model=model, choices=[choice])


def logprobs_of(
    texts: Sequence[str], token: int, logprob: float, ids: Sequence[int], values: Sequence[float]
) -> Logprobs:
    """Of one token; `texts`: every token's text, ready made."""
    top = [
        TopLogprob(token=texts[other], logprob=value, bytes=list(texts[other].encode()))
        for other, value in zip(ids, values, strict=True)
    ]
    text = texts[token]
    entry = TokenLogprob(token=text, logprob=logprob, bytes=list(text.encode()), top_logprobs=top)
    return Logprobs(content=[entry])
