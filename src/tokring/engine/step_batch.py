"""StepBatch: the tokens of one engine step, as the model runner sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Views of preallocated buffers; valid until the next step is scheduled. n requests, T tokens, m of them sample.

    Request i owns tokens query_start[i] : query_start[i + 1]; they sit at `positions`, and their keys and values belong
    in cache slot slot_mapping[t] = block_id * block_size + offset. Attention of request i covers seq_lens[i] positions.
    token_ids[t] = -1 - i, only where steps run ahead: what sample i of the step launched just before turns out to be.
    """

    rows: Int32  # [n] row in the request columns
    num_scheduled: Int32  # [n] tokens of this step, each at least 1
    num_computed: Int32  # [n] positions whose KV exists before the step
    query_start: Int32  # [n + 1]
    token_ids: Int32  # [T]
    positions: Int32  # [T]
    slot_mapping: Int64  # [T]
    seq_lens: Int32  # [n] = num_computed + num_scheduled
    block_table: Int32  # [n, max_blocks_per_seq]; entries past a sequence's blocks are stale, never to be followed
    sample_index: Int32  # [m] index in n of the requests that sample a token
    logits_index: (
        Int32  # [m + p + d] index in T of tokens whose logits are wanted: the m samples, prompt logprobs, drafts
    )
    num_drafts: Int32 | None = None  # [m] drafted tokens behind the sampling one, d in all; None: there are none

    @property
    def num_requests(self) -> int:
        """Return n."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return len(self.token_ids)


@dataclass(slots=True)
class DrawColumns:
    """How the m samples of a step are drawn, as tokring_kernels.sample takes it; valid as long as their batch."""

    temperature: NDArray[np.float32]  # [m]
    top_k: Int32  # [m]
    top_p: NDArray[np.float32]  # [m]
    min_p: NDArray[np.float32]  # [m]
    seed: Int64  # [m]
    choice: NDArray[np.uint32]  # [m]
    position: Int64  # [m] of the token to be drawn
