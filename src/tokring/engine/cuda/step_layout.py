"""StepLayout: a StepBatch in the order of the device: lanes first, one token each, then the chunks of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokring.engine.step_batch import StepBatch

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Rows of the forward pass: [0, num_lanes) are lanes, behind them come the chunks' tokens. All int32."""

    num_lanes: int  # the highest lane in use and those below it
    lanes: Int32  # [d] that compute a token: requests with one token to compute, which also sample
    lane_lengths: Int32  # [d] of their sequences, that token included
    lane_tokens: Int32  # [d] -1 - i for those that only the device knows
    lane_tables: Int32  # [d, max_blocks]
    chunk_tokens: Int32  # [c]
    chunk_positions: Int32  # [c]
    chunk_slots: Int32  # [c]
    chunk_starts: Int32  # [p + 1]
    chunk_lengths: Int32  # [p]
    chunk_tables: Int32  # [p, width]
    logits_rows: Int32  # [len(batch.logits_index)] rows of the forward pass
    sample_lanes: Int32  # [m]
    finished_lanes: Int32  # [f] lanes of the chunks that sample
    finished_lengths: Int32  # [f]

    @classmethod
    def of(cls, batch: StepBatch) -> StepLayout:
        """Requests that decode become lanes; without others that is what the batch is already."""
        if batch.num_tokens == batch.num_requests == len(batch.sample_index):
            return cls._of_decoding(batch)
        samples = np.zeros(batch.num_requests, np.bool_)
        samples[batch.sample_index] = True
        decodes = samples & (batch.num_scheduled == 1)
        lane_index, chunk_index = np.flatnonzero(decodes), np.flatnonzero(~decodes)
        lanes = batch.rows[lane_index]
        num_lanes = int(lanes.max()) + 1 if len(lanes) else 0
        counts = batch.num_scheduled[chunk_index]
        starts = np.concatenate((_ZERO, np.cumsum(counts, dtype=np.int32)))
        num_tokens = int(starts[-1])
        tokens = np.repeat(batch.query_start[chunk_index] - starts[:-1], counts) + np.arange(num_tokens, dtype=np.int32)
        rows = np.empty(batch.num_tokens, np.int32)
        lane_token_index = batch.query_start[lane_index]
        rows[lane_token_index] = lanes
        rows[tokens] = num_lanes + np.arange(num_tokens, dtype=np.int32)
        width = -(-int(batch.seq_lens[chunk_index].max()) // 16) if len(chunk_index) else 0
        finished = chunk_index[samples[chunk_index]]
        return cls(
            num_lanes=num_lanes,
            lanes=lanes,
            lane_lengths=batch.seq_lens[lane_index],
            lane_tokens=batch.token_ids[lane_token_index],
            lane_tables=batch.block_table[lane_index],
            chunk_tokens=batch.token_ids[tokens],
            chunk_positions=batch.positions[tokens],
            chunk_slots=batch.slot_mapping[tokens].astype(np.int32),
            chunk_starts=starts,
            chunk_lengths=batch.seq_lens[chunk_index],
            chunk_tables=batch.block_table[chunk_index, :width],
            logits_rows=rows[batch.logits_index],
            sample_lanes=batch.rows[batch.sample_index],
            finished_lanes=batch.rows[finished],
            finished_lengths=batch.seq_lens[finished],
        )

    @classmethod
    def _of_decoding(cls, batch: StepBatch) -> StepLayout:
        return cls(
            num_lanes=int(batch.rows.max()) + 1,
            lanes=batch.rows,
            lane_lengths=batch.seq_lens,
            lane_tokens=batch.token_ids,
            lane_tables=batch.block_table,
            chunk_tokens=_NONE,
            chunk_positions=_NONE,
            chunk_slots=_NONE,
            chunk_starts=_ZERO,
            chunk_lengths=_NONE,
            chunk_tables=_NO_TABLE,
            logits_rows=batch.rows[batch.logits_index],
            sample_lanes=batch.rows,
            finished_lanes=_NONE,
            finished_lengths=_NONE,
        )

    @classmethod
    def dry(cls, num_tokens: int) -> StepLayout:
        """Chunks of one block each that cache nothing and sample nothing, to try kernels out.

        All of them are turned as at position 0, which the shortest --max-model-len has.
        """
        starts = np.append(np.arange(0, num_tokens, 16, dtype=np.int32), np.int32(num_tokens))
        return cls(
            num_lanes=0,
            lanes=_NONE,
            lane_lengths=_NONE,
            lane_tokens=_NONE,
            lane_tables=_NO_TABLE,
            chunk_tokens=np.zeros(num_tokens, np.int32),
            chunk_positions=np.zeros(num_tokens, np.int32),
            chunk_slots=np.full(num_tokens, -1, np.int32),
            chunk_starts=starts,
            chunk_lengths=np.diff(starts),
            chunk_tables=np.zeros((len(starts) - 1, 1), np.int32),
            logits_rows=np.zeros(1, np.int32),
            sample_lanes=_NONE,
            finished_lanes=_NONE,
            finished_lengths=_NONE,
        )

    @property
    def num_chunk_tokens(self) -> int:
        """Return c."""
        return len(self.chunk_tokens)


_NONE = np.zeros(0, np.int32)
_ZERO = np.zeros(1, np.int32)
_NO_TABLE = np.zeros((0, 1), np.int32)
