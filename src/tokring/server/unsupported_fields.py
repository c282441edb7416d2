"""Documented request fields that this server does not honour: each is refused by a 400 that names it."""

from collections.abc import Callable
from typing import Any

from tokring.server.api_types import GenerationFields, TokenizeRequest
from tokring.server.errors import unsupported

Accepted = Callable[[Any], bool]


def _one_of(*values: Any) -> Accepted:
    return lambda value: value in values


def _never(value: Any) -> bool:
    return False


# field -> (which values are accepted because they ask for what the server does anyway, why others are not)
_FIELDS: dict[str, tuple[Accepted, str]] = {
    "use_beam_search": (_one_of(False), "there is no beam search; use n or best_of."),
    "length_penalty": (_one_of(1, 1.0), "it only applies to beam search."),
    "spaces_between_special_tokens": (_one_of(True, False), ""),
    "suffix": (_one_of(""), "the model has no fill-in-the-middle format."),
    "prompt_embeds": (_never, "prompts are text or token ids."),
    "logits_processors": (_one_of([]), "logits processors are not run."),
    "kv_transfer_params": (_never, "the KV cache is not transferred between servers."),
    "ec_transfer_params": (_never, "there is no encoder cache."),
    "vllm_xargs": (_one_of({}), "there are no extensions it could be passed to."),
    "mm_processor_kwargs": (_one_of({}), "the model takes text only."),
    "media_io_kwargs": (_one_of({}), "the model takes text only."),
    "repetition_detection": (_never, "repetitions are not detected."),
    "watermarking": (_one_of(False), "outputs are not watermarked."),
    "routed_experts_prompt_start": (_one_of(0), "routed experts are not reported."),
    "return_token_offsets": (_one_of(False), "offsets of tokens are not reported."),
    "return_prompt_text": (_one_of(False), "/v1/chat/completions/render has the prompt's text."),
    "guided_decoding_backend": (_one_of("auto", "xgrammar"), "the backend is fixed."),
    "guided_whitespace_pattern": (_never, "the white space of constrained output is fixed."),
    "audio": (_never, "the model answers in text only."),
    "modalities": (_one_of([], ["text"]), "the model answers in text only."),
    "prediction": (_never, "predicted outputs are not used."),
    "web_search_options": (_never, "the server does not search the web."),
    "functions": (_one_of([]), "it is deprecated; use tools."),
    "function_call": (_one_of("none"), "it is deprecated; use tool_choice."),
    "store": (_one_of(False), "the server stores nothing."),
    "service_tier": (_one_of("auto", "default"), "there is one tier only."),
    "thinking_token_budget": (_one_of(-1), "thinking is not limited apart from max_tokens."),
    "include_reasoning": (_one_of(True), "reasoning is part of the content."),
    "verbosity": (_one_of("medium"), "the model has no such setting."),
    "prompt_cache_options": (
        _one_of({}, {"mode": "implicit"}),
        "every prompt's beginning is cached, until it is evicted.",
    ),
    "prompt_cache_retention": (_one_of("in_memory", "in-memory"), "prefixes are cached in memory only."),
    "moderation": (_never, "nothing is moderated."),
    # Of /inference/v1/generate's sampling_params.
    "output_kind": (_one_of(1, 2), "streams bring deltas, whole answers everything."),
    "flat_logprobs": (_one_of(False), "logprobs have the form of chat completions."),
    "prompt_logprob_token_ids": (_one_of([]), "use prompt_logprobs."),
    "prompt_logprob_start": (_one_of(0), "prompt_logprobs begin with the prompt."),
    "skip_reading_prefix_cache": (_one_of(False), "use a cache_salt of your own."),
    "trace_decode_token_ids": (_never, "tokens are sampled, not given."),
    "extra_args": (_one_of({}), "there are no extensions they could be passed to."),
}


def refuse_unsupported_fields(request: GenerationFields | TokenizeRequest) -> None:
    """Raises ApiError (400, unsupported_parameter) for the first field that would have to be ignored."""
    options = getattr(request, "stream_options", None)
    if options is not None and options.include_obfuscation:
        raise unsupported("stream_options", "include_obfuscation would need padding in every chunk.")
    for field, (accepted, reason) in _FIELDS.items():
        value = getattr(request, field, None)
        if value is not None and not accepted(value):
            raise unsupported(field, reason)
