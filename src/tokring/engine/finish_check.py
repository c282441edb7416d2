"""finish_reasons: which of a step's requests end with the token just sampled, and why."""

from __future__ import annotations

from collections.abc import Iterator

from tokring.engine.request_columns import RequestColumns
from tokring.engine.sampling import SampledTokens
from tokring_ipc import ErrorCode, FinishReason


def finish_reasons(
    columns: RequestColumns, sampled: SampledTokens
) -> Iterator[tuple[int, FinishReason, ErrorCode, int]]:
    """Yield (row, reason, error, stop id or -1) of rows that end; call after the tokens were accounted for.

    A stop id wins over the length limit.
    """
    ended = sampled.ended
    assert ended is not None
    if columns.num_special:
        ended = sorted({*ended, *_at_further_stop_ids(columns, sampled), *sampled.grammar_ends})
    for index in ended:
        row, token_id = sampled.rows.item(index), sampled.token_ids.item(index)
        request = columns.requests[row]
        if index in sampled.grammar_ends:
            yield row, *sampled.grammar_ends[index], -1
        elif not sampled.finite.item(index):
            yield row, FinishReason.ERROR, ErrorCode.NOT_FINITE, -1
        elif token_id in request.stop_ids or token_id in request.more_stop_ids:
            yield row, FinishReason.STOP, ErrorCode.NONE, token_id
        else:
            yield row, FinishReason.LENGTH, ErrorCode.NONE, -1


def _at_further_stop_ids(columns: RequestColumns, sampled: SampledTokens) -> list[int]:
    """Indices where a stop id was sampled that is not among the inline ones."""
    special = columns.is_special[sampled.rows].nonzero()[0].tolist()
    return [
        index
        for index in special
        if int(sampled.token_ids[index]) in columns.requests[sampled.rows[index]].more_stop_ids
    ]
