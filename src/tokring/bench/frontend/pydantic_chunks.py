"""Chunks as pydantic models, shaped like OpenAI's: what a FastAPI server builds for each token."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    content: list[TokenLogprob] | None = None


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class Choice(BaseModel):
    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Chunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[Choice]


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
