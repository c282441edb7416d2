"""BatchBuilder: the scheduled rows become a StepBatch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.block_pool import BlockPool
from tokring.engine.block_table import BlockTable
from tokring.engine.engine_config import EngineConfig
from tokring.engine.request import Request
from tokring.engine.request_columns import RequestColumns
from tokring.engine.step_batch import StepBatch

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
_CACHED_SIZES = 64  # of batches


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
        self._batch = lru_cache(_CACHED_SIZES)(self._make_batch)  # steady batches change their size rarely
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

    def admit(self, pool: BlockPool, request: Request, max_hits: int, spare: int) -> int:
        """Give the next row blocks for all tokens of `request`, those shared that hold the beginning of its chain.

        Returns how many these are, at most max_hits; -1, with nothing done, unless `spare` blocks stay free.
        """
        num_blocks = -(-len(request.token_ids) // self._table.block_size)
        return self._native.admit(self._columns.num_rows, pool.native, request.chain, max_hits, num_blocks, spare)

    def insert(self, pool: BlockPool, row: int, chain: bytes, first: int, stop: int) -> None:
        """Make blocks [first, stop) of a row findable under these digests of `chain`."""
        self._native.insert(row, pool.native, chain, first, stop)

    def leave(self, pool: BlockPool, row: int) -> None:
        """Release the blocks of a row that leaves; the last row is about to move into its place."""
        self._native.leave(row, self._columns.num_rows - 1, pool.native)

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

    def resolve(self, rows: Int32, lengths: Int64 | None, token_ids: Int32, now_ns: int) -> tuple[list[int], int]:
        """Say what tokens lengths[i] of rows[i] are, -1 for none. None: the last step's, advance() comes with it.

        Returns the indices of those that end by length, an inline stop id or -1, and how many are -1.
        """
        return self._native.resolve(rows, lengths, token_ids, self._columns.num_stop_columns, now_ns)

    def build(self) -> StepBatch | None:
        """Rows with num_scheduled > 0, each with that many tokens; None if there are none."""
        num_requests, num_tokens, num_samples = self._native.build(self._columns.num_rows)
        num_drafts = None if self._num_drafts is None else self._take_drafts(self._num_drafts)
        if not num_requests:
            return None
        batch = self._batch(num_requests, num_tokens, num_samples)
        if num_requests < self._columns.num_rows:
            batch = replace(batch, block_table=self._gather_table(batch.rows))
        if self._columns.num_special:
            batch = replace(batch, logits_index=self._with_prompt_logits(batch))
        if num_drafts is not None:
            drafts = num_drafts[batch.rows[batch.sample_index]]
            logits_index = _with_draft_logits(batch.logits_index, drafts)
            batch = replace(batch, num_drafts=drafts, logits_index=logits_index)
        return batch

    def _make_batch(self, num_requests: int, num_tokens: int, num_samples: int) -> StepBatch:
        """Return a StepBatch of that size, with all running requests in it."""
        rows, num_scheduled, num_computed, _, seq_lens, sample_index, logits_index = self._by_row[:, :num_requests]
        token_ids, positions = self._by_token[:, :num_tokens]
        return StepBatch(
            rows,
            num_scheduled,
            num_computed,
            self._by_row[3, : num_requests + 1],
            token_ids,
            positions,
            self._slot_mapping[:num_tokens],
            seq_lens,
            self._table.block_ids[:num_requests],
            sample_index[:num_samples],
            logits_index[:num_samples],
        )

    def _take_drafts(self, num_drafts: Int32) -> Int32 | None:
        """Drafts by row, None if there are none; they are no tokens of their sequences any more."""
        self._num_drafts = None
        if not num_drafts.any():
            return None
        self._columns.num_tokens[: len(num_drafts)] -= num_drafts
        return num_drafts

    def _gather_table(self, rows: Int32) -> Int32:
        width = int(self._table.num_blocks[rows].max())
        self._gathered_table[: len(rows), :width] = self._table.block_ids[rows, :width]
        return self._gathered_table[: len(rows)]

    def _with_prompt_logits(self, batch: StepBatch) -> Int32:
        """Append the tokens whose logits are asked for as prompt logprobs, request by request."""
        parts = [batch.logits_index]
        for index in np.flatnonzero(self._columns.is_special[batch.rows]).tolist():
            first, stop = self._columns.prompt_logits(int(batch.rows[index]), int(batch.num_scheduled[index]))
            parts.append(batch.query_start[index] + np.arange(first, stop, dtype=np.int32))
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
