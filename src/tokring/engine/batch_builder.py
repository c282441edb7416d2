"""BatchBuilder: the scheduled rows become a StepBatch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.block_pool import BlockPool
from tokring.engine.block_table import BlockTable
from tokring.engine.engine_config import EngineConfig
from tokring.engine.request_columns import RequestColumns
from tokring.engine.step_batch import StepBatch

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class BatchBuilder:
    """The loops over rows that every step makes, each one native call over columns and block table."""

    def __init__(self, columns: RequestColumns, table: BlockTable, config: EngineConfig) -> None:
        self._columns = columns
        self._table = table
        self._draft_rules = (config.prompt_lookup_min, config.prompt_lookup_max, config.num_speculative_tokens)
        self._num_drafts: Int32 | None = None  # by row, between draft() and build()
        self._by_row = np.zeros((7, columns.max_rows + 1), np.int32)
        self._by_token = np.zeros((2, config.max_num_batched_tokens), np.int32)
        self._slot_mapping = np.zeros(config.max_num_batched_tokens, np.int64)
        self._gathered_table = np.zeros_like(table.block_ids)
        self._native = tokring_kernels.StepColumns(
            num_tokens=columns.num_tokens,
            num_computed=columns.num_computed,
            num_scheduled=columns.num_scheduled,
            last_token=columns.last_token,
            max_total=columns.max_total,
            token_base=columns.token_base,
            first_token_ns=columns.first_token_ns,
            token_ids=columns.token_ids,
            stop_ids=columns.stop_ids,
            block_ids=table.block_ids,
            num_blocks=table.num_blocks,
            block_size=table.block_size,
            step_rows=self._by_row,
            step_tokens=self._by_token,
            slot_mapping=self._slot_mapping,
        )

    def plan(self, held: NDArray[np.bool_] | None) -> tuple[int, list[int]]:
        """Schedule one token for each row that lacks one, unless held; return how many, and the rows that lack more."""
        return self._native.plan(self._columns.num_rows, held)

    def grow(self, pool: BlockPool) -> bool:
        """Give every row blocks for all its tokens; False, with nothing done, if there are too few."""
        return self._native.grow(self._columns.num_rows, pool.native)

    def draft(self, pool: BlockPool, budget: int) -> None:
        """Add drafts to plain decoding rows: those whose sampling needs no more than columns say, without logprobs."""
        columns, count = self._columns, self._columns.num_rows
        plain = (columns.is_special[:count] == 0) & (columns.num_logprobs[:count] < 0)
        self._num_drafts = self._native.draft(count, plain.astype(np.int32), self._draft_rules, budget, pool.native)

    def verify(self, rows: Int32, num_drafts: Int32, token_ids: Int32, following: Int32) -> Int32:
        """Accept drafts that are what was sampled; returns how many of rows[i], token_ids[i] is the token behind."""
        return self._native.verify(rows, num_drafts, following, self._columns.num_stop_columns, token_ids)

    def advance(self) -> Int64:
        """Count the step built last as computed; each sample i appends -1 - i. Returns the rows' lengths before it."""
        return self._native.advance()

    def resolve(self, rows: Int32, lengths: Int64, token_ids: Int32, now_ns: int) -> tuple[Int32, int, int]:
        """Say what tokens lengths[i] of rows[i] are, -1 for none.

        Returns the indices of those that end by length, an inline stop id or -1; how many are -1; how many are the
        first of their request.
        """
        return self._native.resolve(rows, lengths, token_ids, self._columns.num_stop_columns, now_ns)

    def build(self) -> StepBatch | None:
        """Rows with num_scheduled > 0, each with that many tokens; None if there are none."""
        num_requests, num_tokens, num_samples = self._native.build(self._columns.num_rows)
        num_drafts = self._take_drafts()
        if not num_requests:
            return None
        rows, num_scheduled, num_computed, _, seq_lens, sample_index, logits_index = self._by_row[:, :num_requests]
        query_start = self._by_row[3, : num_requests + 1]
        logits_index = logits_index[:num_samples]
        if self._columns.num_special:
            logits_index = self._with_prompt_logits(rows, num_scheduled, query_start, logits_index)
        sample_index = sample_index[:num_samples]
        if num_drafts is not None:
            num_drafts = num_drafts[rows[sample_index]]
            logits_index = _with_draft_logits(logits_index, num_drafts)
        return StepBatch(
            rows=rows,
            num_scheduled=num_scheduled,
            num_computed=num_computed,
            query_start=query_start,
            token_ids=self._by_token[0, :num_tokens],
            positions=self._by_token[1, :num_tokens],
            slot_mapping=self._slot_mapping[:num_tokens],
            seq_lens=seq_lens,
            block_table=self._block_table(rows),
            sample_index=sample_index,
            logits_index=logits_index,
            num_drafts=num_drafts,
        )

    def _take_drafts(self) -> Int32 | None:
        """Drafts by row, None if there are none; they are no tokens of their sequences any more."""
        num_drafts, self._num_drafts = self._num_drafts, None
        if num_drafts is None or not num_drafts.any():
            return None
        self._columns.num_tokens[: len(num_drafts)] -= num_drafts
        return num_drafts

    def _block_table(self, rows: Int32) -> Int32:
        if len(rows) == self._columns.num_rows:
            return self._table.block_ids[: len(rows)]
        width = int(self._table.num_blocks[rows].max())
        self._gathered_table[: len(rows), :width] = self._table.block_ids[rows, :width]
        return self._gathered_table[: len(rows)]

    def _with_prompt_logits(self, rows: Int32, num_scheduled: Int32, query_start: Int32, logits_index: Int32) -> Int32:
        """Append the tokens whose logits are asked for as prompt logprobs, request by request."""
        parts = [logits_index]
        for index in np.flatnonzero(self._columns.is_special[rows]).tolist():
            first, stop = self._columns.prompt_logits(int(rows[index]), int(num_scheduled[index]))
            parts.append(query_start[index] + np.arange(first, stop, dtype=np.int32))
        return np.concatenate(parts)


def _with_draft_logits(logits_index: Int32, num_drafts: Int32) -> Int32:
    """Each sample's logits are those of its first token, with the last ones of its drafts; these come at the end."""
    num_samples = len(num_drafts)
    logits_index = logits_index.copy()
    logits_index[:num_samples] -= num_drafts
    within = np.arange(int(num_drafts.sum()), dtype=np.int32) - np.repeat(
        np.cumsum(num_drafts) - num_drafts, num_drafts
    )
    drafts = np.repeat(logits_index[:num_samples], num_drafts) + 1 + within
    return np.concatenate((logits_index, drafts.astype(np.int32)))
