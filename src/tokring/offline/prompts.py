"""From what callers give (texts, token ids, conversations) to Prompts that fit the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from tokring.offline.errors import PromptError
from tokring.sampling_params import SamplingParams
from tokring.server.api_types import ChatFields
from tokring.server.chat_template import ChatTemplateError
from tokring.server.conversation import conversation_of
from tokring.server.engine_limits import EngineLimits
from tokring.server.errors import ApiError
from tokring.server.generation import Prompt
from tokring.server.generation_request import check_prompt_ids, with_max_tokens
from tokring.server.prompt_encoder import PromptEncoder
from tokring.server.request_body import convert

PromptInput = str | Sequence[int] | Mapping[str, Any]  # a mapping: {"prompt": text} or {"prompt_token_ids": ids}
Message = Mapping[str, Any]


def as_list_of_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """One prompt (a text, a mapping, a list of ids) or a sequence of them, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], int) else items


def as_list_of_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or a sequence of them, as a list."""
    if isinstance(messages, Mapping) or (messages and isinstance(messages[0], Mapping)):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


async def encode_prompts(prompts: Sequence[PromptInput], encoder: PromptEncoder) -> list[tuple[list[int], str | None]]:
    """(token ids, text or None) of each prompt. Raises PromptError."""
    given = [_text_or_ids(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
    texts = [item for item in given if isinstance(item, str)]
    encoded = iter(await encoder.encode_texts(texts) if texts else [])
    return [(next(encoded), item) if isinstance(item, str) else (item, None) for item in given]


async def encode_conversations(
    conversations: Sequence[Sequence[Message]], options: Mapping[str, Any], encoder: PromptEncoder
) -> list[tuple[list[int], str | None]]:
    """(token ids, rendered text) of each conversation. Raises PromptError."""
    encoded: list[tuple[list[int], str | None]] = []
    for index, messages in enumerate(conversations):
        place = f"conversation {index}"
        if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
            raise PromptError(f"{place}: must be a list of messages, mappings with role and content")
        try:
            fields = convert({**options, "messages": [dict(message) for message in messages]}, ChatFields)
            conversation = conversation_of(fields, None, encoder.chat_template)
            token_ids = await encoder.encode_conversation(conversation)
            encoded.append((token_ids, await encoder.render_conversation(conversation)))
        except (ApiError, ChatTemplateError, orjson.JSONEncodeError) as error:
            raise PromptError(f"{place}: {error}") from None
    return encoded


def fit_prompts(
    encoded: Sequence[tuple[list[int], str | None]], params: Sequence[SamplingParams], limits: EngineLimits
) -> list[Prompt]:
    """Prompts with max_tokens explicit. Raises PromptError for one that does not fit, ParameterError for bad ids."""
    for item in set(params):
        item.check_vocabulary(limits.vocab_size)
    fitting = []
    for index, ((token_ids, text), item) in enumerate(zip(encoded, params, strict=True)):
        if not token_ids:
            raise PromptError(f"prompt {index}: has no token")
        try:
            check_prompt_ids(token_ids, limits)
            fitted = with_max_tokens(item, len(token_ids), limits, "prompt")
        except ApiError as error:
            raise PromptError(f"prompt {index}: {error.message}") from None
        if fitted.num_choices > fitted.n and fitted.logprobs is None:
            fitted = replace(fitted, logprobs=0)  # best_of compares by them
        fitting.append(Prompt(token_ids, fitted, text))
    return fitting


def _text_or_ids(prompt: PromptInput, place: str) -> str | list[int]:
    if isinstance(prompt, Mapping):
        if isinstance(prompt.get("prompt_token_ids"), str):
            raise PromptError(f"{place}: 'prompt_token_ids' must be a list of token ids, not str")
        inner = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if inner is None or isinstance(inner, Mapping):
            raise PromptError(f"{place}: a mapping needs 'prompt' or 'prompt_token_ids'")
        prompt = inner
    if isinstance(prompt, str):
        _check_unicode(prompt, place)
        return prompt
    try:
        return [int(token_id) for token_id in prompt]
    except (TypeError, ValueError):
        raise PromptError(f"{place}: must be a text or a list of token ids, not {type(prompt).__name__}") from None


def _check_unicode(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{place}: not valid Unicode: it has a lone surrogate") from None
