"""finish_reasons: which of a step's requests end with the token just sampled, and why."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

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
    stopped = np.zeros(len(rows), np.bool_)
    for stop_ids in columns.stop_ids[: columns.num_stop_columns]:
        stopped |= stop_ids[chosen] == token_ids
    if columns.num_special:
        for index in np.flatnonzero(columns.is_special[rows]).tolist():
            if int(token_ids[index]) in columns.requests[rows[index]].more_stop_ids:
                stopped[index] = True
    ended |= stopped
    ended |= ~sampled.finite
    for index in np.flatnonzero(ended).tolist():
        row = int(rows[index])
        if not sampled.finite[index]:
            yield row, FinishReason.ERROR, ErrorCode.NOT_FINITE, -1
        elif stopped[index]:
            yield row, FinishReason.STOP, ErrorCode.NONE, int(token_ids[index])
        else:
            yield row, FinishReason.LENGTH, ErrorCode.NONE, -1
