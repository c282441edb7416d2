"""The REQ record and extensions of one choice, from its SamplingParams; semantics of ipc/include/tokring/layout.hpp."""

import json
import random
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tokring.sampling_params import SamplingParams, StructuredKind, StructuredOutput
from tokring_ipc import REQUEST_DTYPE, ExtensionKind, RequestFlag, encode_extensions

NUM_INLINE_STOP_IDS = 8
NO_STREAM_SLOT = 0xFFFFFFFF
NO_LOGPROBS = -1
_INT32_MAX = 2**31 - 1
_GRAMMAR_KINDS = {
    StructuredKind.JSON_SCHEMA: ExtensionKind.GRAMMAR_JSON_SCHEMA,
    StructuredKind.JSON_OBJECT: ExtensionKind.GRAMMAR_JSON_OBJECT,
    StructuredKind.REGEX: ExtensionKind.GRAMMAR_REGEX,
    StructuredKind.CHOICE: ExtensionKind.GRAMMAR_CHOICE,
    StructuredKind.GRAMMAR: ExtensionKind.GRAMMAR_EBNF,
    StructuredKind.STRUCTURAL_TAG: ExtensionKind.GRAMMAR_STRUCTURAL_TAG,
}


def seed_source(server_seed: int | None, frontend_index: int = 0) -> Callable[[], int]:
    """Draws a seed for each request that gave none: here, so that the request can be resumed after an engine crash.

    With a seed of the server's own the draws are the same after every start (and others in each front end).
    """
    source = secrets.SystemRandom() if server_seed is None else random.Random(f"{server_seed}.{frontend_index}")
    return partial(source.getrandbits, 63)


def to_record(
    params: SamplingParams,
    *,
    stream_slot: int,
    slot_generation: int,
    max_tokens: int,
    eos_ids: Sequence[int],
    seed: int,
    arrival_ns: int,
    choice_index: int = 0,
    parent_slot: int = NO_STREAM_SLOT,
    deadline_ns: int = 0,
    num_prior_output: int = 0,
) -> tuple[np.ndarray, bytes]:
    """(REQUEST_DTYPE[1], extension bytes) of one choice. num_ids and extension_bytes are filled on submit.

    max_tokens is explicit: the caller has put in what the context leaves. EOS ids go first among the inline stop ids,
    marked in eos_mask, unless ignore_eos. num_logprobs is -1 where none are wanted.
    """
    record = np.zeros(1, REQUEST_DTYPE)
    row = record[0]
    row["stream_slot"], row["slot_generation"] = stream_slot, slot_generation
    row["parent_slot"], row["choice_index"] = parent_slot, choice_index
    row["num_prior_output"] = num_prior_output
    row["flags"] = _flags(params, num_prior_output)
    row["max_tokens"], row["min_tokens"] = max_tokens, min(params.min_tokens, max_tokens)
    row["num_logprobs"] = NO_LOGPROBS if params.logprobs is None else params.logprobs
    row["num_prompt_logprobs"] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
    row["temperature"] = 0.0 if params.is_greedy else params.temperature
    row["top_p"], row["min_p"] = params.top_p, params.min_p
    row["top_k"] = min(max(params.top_k, 0), _INT32_MAX)
    row["repetition_penalty"] = params.repetition_penalty
    row["presence_penalty"], row["frequency_penalty"] = params.presence_penalty, params.frequency_penalty
    row["priority"], row["seed"] = params.priority, seed
    row["arrival_ns"], row["deadline_ns"] = arrival_ns, deadline_ns
    further_stop_ids = _fill_stop_ids(row, params, eos_ids)
    return record, encode_extensions(_extensions(params, further_stop_ids))


def _flags(params: SamplingParams, num_prior_output: int) -> int:
    flags = 0
    if params.seed is not None:
        flags |= RequestFlag.SEED_GIVEN
    if num_prior_output:
        flags |= RequestFlag.RESUMED
    return int(flags)


def _fill_stop_ids(row: np.void, params: SamplingParams, eos_ids: Sequence[int]) -> list[int]:
    """Fills the inline stop ids and eos_mask; returns the ids that did not fit."""
    eos = [] if params.ignore_eos else list(dict.fromkeys(eos_ids))[:NUM_INLINE_STOP_IDS]
    stop_ids = eos + [token_id for token_id in dict.fromkeys(params.stop_token_ids) if token_id not in eos]
    inline = stop_ids[:NUM_INLINE_STOP_IDS]
    row["stop_ids"][: len(inline)] = inline
    row["num_stop_ids"] = len(inline)
    row["eos_mask"] = (1 << len(eos)) - 1
    return stop_ids[NUM_INLINE_STOP_IDS:]


def _extensions(params: SamplingParams, further_stop_ids: Sequence[int]) -> list[tuple[ExtensionKind, bytes]]:
    items: list[tuple[ExtensionKind, bytes]] = []
    if further_stop_ids:
        items.append((ExtensionKind.STOP_IDS, _int32_bytes(further_stop_ids)))
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        items.append((ExtensionKind.LOGIT_BIAS, _int32_bytes(token_ids) + np.asarray(biases, "<f4").tobytes()))
    if params.allowed_token_ids is not None:
        items.append((ExtensionKind.ALLOWED_IDS, _int32_bytes(params.allowed_token_ids)))
    if params.bad_words:
        items.append((ExtensionKind.BAD_WORDS, _bad_words_bytes(params.bad_words)))
    if params.structured_output is not None:
        items.append(_grammar_extension(params.structured_output))
    if params.cache_salt:
        items.append((ExtensionKind.CACHE_SALT, params.cache_salt.encode()))
    if params.logprob_token_ids:
        items.append((ExtensionKind.LOGPROB_IDS, _int32_bytes(params.logprob_token_ids)))
    return items


def _grammar_extension(constraint: StructuredOutput) -> tuple[ExtensionKind, bytes]:
    text = "{}" if constraint.kind is StructuredKind.JSON_OBJECT else constraint.text
    return _GRAMMAR_KINDS[constraint.kind], text.encode()


def _bad_words_bytes(words: Sequence[Sequence[int]]) -> bytes:
    lengths = np.asarray([len(words), *(len(word) for word in words)], "<u4")
    return lengths.tobytes() + _int32_bytes([token_id for word in words for token_id in word])


def _int32_bytes(values: Sequence[int]) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def choice_text(choices: Sequence[str]) -> str:
    """The text of a GRAMMAR_CHOICE extension."""
    return json.dumps(list(choices), ensure_ascii=False)
