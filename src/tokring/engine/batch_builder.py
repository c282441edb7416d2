"""BatchBuilder: the scheduled rows become a StepBatch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokring.engine.block_table import BlockTable
from tokring.engine.engine_config import EngineConfig
from tokring.engine.request_columns import RequestColumns
from tokring.engine.step_batch import StepBatch


class BatchBuilder:
    """Turns columns and block table into the arrays of one step, in views where every row takes part."""

    def __init__(self, columns: RequestColumns, table: BlockTable, config: EngineConfig) -> None:
        self._columns = columns
        self._table = table
        self._arange = np.arange(config.max_num_batched_tokens + 1, dtype=np.int32)
        self._gathered_table = np.zeros_like(table.block_ids)

    def build_decode(self) -> StepBatch:
        """Every row computes exactly its last token: nothing is gathered."""
        columns = self._columns
        num_rows = columns.num_rows
        rows = columns.arange[:num_rows]
        positions = columns.num_computed[:num_rows]
        return StepBatch(
            rows=rows,
            num_scheduled=columns.num_scheduled[:num_rows],
            num_computed=positions,
            query_start=columns.arange[: num_rows + 1],
            token_ids=columns.last_token[:num_rows],
            positions=positions,
            slot_mapping=self._table.slot_mapping(slice(0, num_rows), positions),
            seq_lens=columns.num_tokens[:num_rows],
            block_table=self._table.block_ids[:num_rows],
            sample_index=rows,
            logits_index=rows,
        )

    def build(self) -> StepBatch | None:
        """Rows with num_scheduled > 0, each with that many tokens; None if there are none."""
        columns = self._columns
        indices = columns.num_scheduled[: columns.num_rows].nonzero()[0]
        if not len(indices):
            return None
        rows = indices.astype(np.int32)
        chosen = columns.select(rows)
        num_scheduled = columns.num_scheduled[chosen]
        num_computed = columns.num_computed[chosen]
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(num_scheduled, out=query_start[1:])
        # Position of token t of request i: num_computed[i] + t - query_start[i].
        positions = (num_computed - query_start[:-1]).repeat(num_scheduled)
        positions += self._arange[: len(positions)]
        token_rows = indices.repeat(num_scheduled)
        seq_lens = num_computed + num_scheduled
        sample_index = (seq_lens == columns.num_tokens[chosen]).nonzero()[0]
        logits_index = query_start[1:][sample_index] - np.int32(1)
        return StepBatch(
            rows=rows,
            num_scheduled=num_scheduled,
            num_computed=num_computed,
            query_start=query_start,
            token_ids=columns.token_ids[columns.token_base[token_rows] + positions],
            positions=positions,
            slot_mapping=self._table.slot_mapping(token_rows, positions),
            seq_lens=seq_lens,
            block_table=self._block_table(rows),
            sample_index=sample_index.astype(np.int32),
            logits_index=self._with_prompt_logits(rows, num_scheduled, query_start, logits_index),
        )

    def _block_table(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        if len(rows) == self._columns.num_rows:
            return self._table.block_ids[: len(rows)]
        width = int(self._table.num_blocks[rows].max())
        self._gathered_table[: len(rows), :width] = self._table.block_ids[rows, :width]
        return self._gathered_table[: len(rows)]

    def _with_prompt_logits(
        self,
        rows: NDArray[np.int32],
        num_scheduled: NDArray[np.int32],
        query_start: NDArray[np.int32],
        logits_index: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """Append the tokens whose logits are asked for as prompt logprobs, request by request."""
        if not self._columns.num_special:
            return logits_index
        parts = [logits_index]
        for index in np.flatnonzero(self._columns.is_special[rows]).tolist():
            first, stop = self._columns.prompt_logits(int(rows[index]), int(num_scheduled[index]))
            parts.append(query_start[index] + self._arange[first:stop])
        return np.concatenate(parts)
