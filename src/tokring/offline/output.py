"""What generate() and chat() hand back, in vLLM's names."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position; rank 1 is the most likely, None where the engine did not say."""

    logprob: float
    rank: int | None
    decoded_token: str


Logprobs = list[dict[int, Logprob]]  # by position: token id -> Logprob, the chosen token included


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" | "length"
    stop_reason: int | str | None  # the stop string or stop token id of the request that ended it
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request; completion_tokens of all its sequences together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All sequences of one prompt. `error`: why there are none (the other prompts of the batch are not touched)."""

    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    usage: Usage
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
