"""From the outcomes of one prompt to its RequestOutput."""

import math
from collections.abc import Sequence
from typing import Any

import orjson

from tokring.offline.output import CompletionOutput, Logprob, RequestOutput, Usage
from tokring.sampling_params import SamplingParams
from tokring.server.generation import Outcome, Prompt, usage_of
from tokring.server.prompt_logprobs import PromptLogprobTable
from tokring.server.stream import Stream
from tokring.server.token_path import TokenTable

_ID_PREFIX = "token_id:"  # how the token path names tokens when asked for ids


def request_output(prompt: Prompt, outcomes: Sequence[Outcome], first: Stream, table: TokenTable) -> RequestOutput:
    """`first`: the stream that computed the prompt. Of best_of sequences the n likeliest are kept, likeliest first."""
    params = prompt.params
    usage = usage_of(outcomes)
    chosen = [(outcome, _logprobs_of(outcome, table)) for outcome in outcomes]
    if params.num_choices > params.n:
        chosen.sort(key=lambda pair: _mean_logprob(pair[0].token_ids, pair[1]), reverse=True)
        del chosen[params.n :]
    return RequestOutput(
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        outputs=[_completion(index, *pair) for index, pair in enumerate(chosen)],
        usage=Usage(
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            cached_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
        ),
        prompt_logprobs=_prompt_logprobs_of(params, prompt.token_ids, first, table),
    )


def _completion(index: int, outcome: Outcome, logprobs: list[dict[int, Logprob]] | None) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=outcome.text,
        token_ids=outcome.token_ids,
        finish_reason=outcome.finish_reason,
        stop_reason=outcome.stop_reason,
        logprobs=logprobs,
    )


def _logprobs_of(outcome: Outcome, table: TokenTable) -> list[dict[int, Logprob]] | None:
    if outcome.logprobs is None:
        return None
    return [_position(entry, table) for entry in orjson.loads(outcome.logprobs)["content"]]


def _position(entry: dict[str, Any], table: TokenTable) -> dict[int, Logprob]:
    """The chosen token first; its rank is known if it is among the likeliest."""
    found: dict[int, Logprob] = {}
    chosen_id = _token_id(entry)
    top = {_token_id(item): (rank, item["logprob"]) for rank, item in enumerate(entry["top_logprobs"], start=1)}
    chosen_rank = top[chosen_id][0] if chosen_id in top else None
    found[chosen_id] = Logprob(entry["logprob"], chosen_rank, _text(table, chosen_id))
    for token_id, (rank, logprob) in top.items():
        found.setdefault(token_id, Logprob(logprob, rank, _text(table, token_id)))
    return found


def _prompt_logprobs_of(
    params: SamplingParams, token_ids: list[int], stream: Stream, table: TokenTable
) -> list[dict[int, Logprob] | None] | None:
    """By prompt position; the first token has none."""
    if params.prompt_logprobs is None:
        return None
    rows = PromptLogprobTable(token_ids, stream.prompt_logprobs, table).as_prompt_logprobs()
    return [None if row is None else {int(key): Logprob(**entry) for key, entry in row.items()} for row in rows]


def _mean_logprob(token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None) -> float:
    values = [row[token_id].logprob for token_id, row in zip(token_ids, logprobs or (), strict=False)]
    return math.fsum(values) / len(values) if values else 0.0


def _token_id(entry: dict[str, Any]) -> int:
    return int(entry["token"].removeprefix(_ID_PREFIX))


def _text(table: TokenTable, token_id: int) -> str:
    return table.bytes_of(token_id).decode("utf-8", "replace")
