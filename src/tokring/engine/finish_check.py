"""finish_reasons: which of a step's requests end with the token just sampled, and why."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tokring.engine.request_columns import RequestColumns
from tokring.engine.sampling import SampledTokens
from tokring_ipc import ErrorCode, FinishReason


def finish_reasons(
    columns: RequestColumns, sampled: SampledTokens
) -> Iterator[tuple[int, FinishReason, ErrorCode, int]]:
    """Yield (row, reason, error, stop id or -1) of rows that end; call after the tokens were appended.

    A stop id wins over the length limit. Vectorised: only rows that end cost Python.
    """
    rows, token_ids = sampled.rows, sampled.token_ids
    chosen = columns.select(rows)
    ended = columns.num_tokens[chosen] >= columns.max_total[chosen]
    for stop_ids in columns.stop_ids[: columns.num_stop_columns]:
        ended |= stop_ids[chosen] == token_ids
    if columns.num_special:
        _add_more_stop_ids(columns, sampled, ended)
    if sampled.num_silent:
        ended |= ~sampled.finite
    for index in ended.nonzero()[0].tolist():
        row, token_id = int(rows[index]), int(token_ids[index])
        request = columns.requests[row]
        if not sampled.finite[index]:
            yield row, FinishReason.ERROR, ErrorCode.NOT_FINITE, -1
        elif token_id in request.stop_ids or token_id in request.more_stop_ids:
            yield row, FinishReason.STOP, ErrorCode.NONE, token_id
        else:
            yield row, FinishReason.LENGTH, ErrorCode.NONE, -1


def _add_more_stop_ids(columns: RequestColumns, sampled: SampledTokens, ended: NDArray[np.bool_]) -> None:
    """Set `ended` where a stop id matches that is not among the inline ones."""
    for index in columns.is_special[sampled.rows].nonzero()[0].tolist():
        if int(sampled.token_ids[index]) in columns.requests[sampled.rows[index]].more_stop_ids:
            ended[index] = True
