"""From a request's fields to SamplingParams: defaults, lengths and vocabulary checked against the engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokring.sampling_params import (
    MAX_BAD_WORDS,
    MAX_STOP_STRINGS,
    ParameterError,
    SamplingParams,
    StructuredOutput,
    parse_logit_bias,
)
from tokring.server.api_types import GenerationFields
from tokring.server.engine_limits import EngineLimits
from tokring.server.errors import context_length_exceeded, invalid_request, unsupported
from tokring.server.front_end import FrontEnd
from tokring.server.generation import TextOptions
from tokring.server.prompt_encoder import PromptEncoder
from tokring.server.stream_options import stream_interval_of
from tokring.server.token_path import LogprobStyle


async def sampling_params_of(
    request: GenerationFields,
    front_end: FrontEnd,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured_output: StructuredOutput | None,
) -> SamplingParams:
    """Raises ApiError or ParameterError naming the field.

    max_tokens and the logprobs: as the route's own fields say.
    """
    defaults, limits = front_end.model.sampling_defaults, front_end.limits
    if request.priority and front_end.config.engine.scheduling_policy != "priority":
        raise unsupported("priority", "requests are computed in the order of their arrival (--scheduling-policy).")
    params = SamplingParams(
        n=_given(request.n, 1),
        best_of=request.best_of,
        temperature=_given(request.temperature, defaults.get("temperature", 1.0)),
        top_p=_given(request.top_p, defaults.get("top_p", 1.0)),
        top_k=_given(request.top_k, defaults.get("top_k", 0)),
        min_p=_given(request.min_p, defaults.get("min_p", 0.0)),
        repetition_penalty=_given(request.repetition_penalty, defaults.get("repetition_penalty", 1.0)),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        seed=request.seed,
        max_tokens=max_tokens,
        min_tokens=_given(request.min_tokens, 0),
        stop=_stop_strings(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=_given(request.skip_special_tokens, True),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=tuple(request.logprob_token_ids or ()),
        logit_bias=parse_logit_bias(request.logit_bias),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words=await _bad_word_ids(request.bad_words, front_end.model.encoder),
        structured_output=structured_output,
        priority=_given(request.priority, 0),
        cache_salt=request.cache_salt,
    )
    params.check_vocabulary(limits.vocab_size)
    _check_logprob_limits(params, limits)
    return params


def text_options_of(
    request: GenerationFields, front_end: FrontEnd, params: SamplingParams, style: LogprobStyle, *, deltas: bool = False
) -> TextOptions:
    """How tokens become text; `style`: of the logprobs, if there are any."""
    return TextOptions(
        eos_ids=front_end.model.eos_ids,
        stream_interval=stream_interval_of(request, front_end.config.server.stream_interval),
        logprob_style=LogprobStyle.NONE if params.logprobs is None else style,
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        return_token_ids=bool(request.return_token_ids),
        deltas=deltas,
    )


def with_max_tokens(
    params: SamplingParams,
    num_prompt_tokens: int,
    limits: EngineLimits,
    prompt_param: str,
    default: int | None = None,
) -> SamplingParams:
    """The same parameters with max_tokens explicit: the client's, else `default` and no more than the context leaves.

    Raises ApiError (400, context_length_exceeded) if the prompt, or prompt and max_tokens, do not fit.
    """
    left = limits.max_model_len - num_prompt_tokens
    if left <= 0:
        detail = f"Your prompt has {num_prompt_tokens} tokens; it must be shorter than the context."
        raise context_length_exceeded(limits.max_model_len, detail, prompt_param)
    if params.max_tokens is None:
        if params.min_tokens > left:
            raise invalid_request(
                f"min_tokens ({params.min_tokens}) is more than the {left} tokens left.", "min_tokens"
            )
        return replace(params, max_tokens=left if default is None else min(left, max(default, params.min_tokens)))
    if params.max_tokens > left:
        total = num_prompt_tokens + params.max_tokens
        detail = (
            f"However, you requested {total} tokens ({num_prompt_tokens} in the prompt, "
            f"{params.max_tokens} for the completion). Reduce the length of the prompt or max_tokens."
        )
        raise context_length_exceeded(limits.max_model_len, detail, prompt_param)
    return params


def truncated(token_ids: list[int], request: GenerationFields, limits: EngineLimits) -> list[int]:
    """vLLM's truncate_prompt_tokens: k ids, the last or (truncation_side "right") the first ones.

    -1 = as many as the context allows with one token to generate.
    """
    asked = request.truncate_prompt_tokens
    if asked is None:
        return token_ids
    keep = limits.max_model_len - 1 if asked == -1 else asked
    if keep < 1 or keep > limits.max_model_len:
        raise invalid_request(
            f"truncate_prompt_tokens must be -1 or 1 to {limits.max_model_len}.", "truncate_prompt_tokens"
        )
    return token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]


def check_prompt_chars(num_chars: int, encoder: PromptEncoder, limits: EngineLimits, prompt_param: str) -> None:
    """Refuses a text that cannot fit whatever its tokens are, before time is spent on encoding it."""
    least_tokens = num_chars // encoder.max_token_chars
    if least_tokens >= limits.max_model_len:
        detail = f"Your prompt has {num_chars} characters, at least {least_tokens} tokens."
        raise context_length_exceeded(limits.max_model_len, detail, prompt_param)


def check_prompt_ids(token_ids: Sequence[int], limits: EngineLimits, param: str = "prompt") -> None:
    """Raises ApiError (400) for an id outside the vocabulary: it must never reach a kernel."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        raise invalid_request(f"{param}: token ids must be between 0 and {limits.vocab_size - 1}.", param)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _stop_strings(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if len(value) > MAX_STOP_STRINGS:
        raise ParameterError("stop", f"stop has {len(value)} strings; at most {MAX_STOP_STRINGS} are allowed.")
    return tuple(dict.fromkeys(value))


async def _bad_word_ids(words: list[str] | None, encoder: PromptEncoder) -> tuple[tuple[int, ...], ...]:
    """Each word as the ids it has at the start of a text and, where they differ, after a space."""
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS or any(not word.strip() or len(word) > 256 for word in words):
        raise ParameterError("bad_words", f"bad_words: at most {MAX_BAD_WORDS} words of 1 to 256 characters.")
    bare = [word.lstrip() for word in words]
    plain = await encoder.encode_texts(bare, add_special_tokens=False)
    spaced = await encoder.encode_texts([" " + word for word in bare], add_special_tokens=False)
    sequences = [tuple(ids) for ids in plain]
    sequences += [
        tuple(after_space)
        for ids, after_space in zip(plain, spaced, strict=True)
        if len(after_space) == len(ids) > 0 and after_space[0] != ids[0]
    ]
    return tuple(dict.fromkeys(sequences))


def _check_logprob_limits(params: SamplingParams, limits: EngineLimits) -> None:
    for param, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None and value > limits.max_logprobs:
            raise invalid_request(f"{param} must be at most {limits.max_logprobs}, got {value}.", param)
    if len(params.logprob_token_ids) > limits.max_logprobs:
        raise invalid_request(
            f"logprob_token_ids: at most {limits.max_logprobs}, got {len(params.logprob_token_ids)}.",
            "logprob_token_ids",
        )


def refuse_best_of(request: GenerationFields, reason: str) -> None:
    """best_of only where choices can be compared before they are sent."""
    if request.best_of is not None and request.best_of != _given(request.n, 1):
        raise unsupported("best_of", reason)
