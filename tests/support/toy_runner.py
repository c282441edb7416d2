"""ToyRunner: a deterministic "model" whose logits depend on every KV entry a sequence should see."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokring.engine.step_batch import StepBatch

_PRIME = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(31))) * _PRIME
    return (values ^ (values >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


class ToyRunner:
    """Keeps one number per cache slot, a hash of (token, position), and hashes what attention would read.

    A wrong slot, a block shared with the wrong content or a stale one changes the tokens that come out.
    """

    name = "toy"
    is_invariant = True
    is_asynchronous: Literal[False] = False

    def __init__(self, vocab_size: int = 97, block_size: int = 16) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.num_executed_tokens = 0
        self.nan_after_token = -1  # logits are NaN where the last token is this one
        self._cache = np.zeros(0, np.uint64)

    def kv_bytes_per_block(self) -> int:
        return 8 * self.block_size

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._cache = np.zeros(num_blocks * self.block_size, np.uint64)

    def warm_up(self) -> None:
        pass

    def execute(self, batch: StepBatch) -> NDArray[np.float32]:
        self._check(batch)
        tokens, positions = batch.token_ids.astype(np.uint64), batch.positions.astype(np.uint64)
        self._cache[batch.slot_mapping] = _mix(tokens + (positions << np.uint64(32)) + np.uint64(1))
        self.num_executed_tokens += batch.num_tokens
        request_of = np.repeat(np.arange(batch.num_requests), batch.num_scheduled)
        logits = np.zeros((len(batch.logits_index), self.vocab_size), np.float32)
        for i, token in enumerate(batch.logits_index):
            context = np.arange(batch.positions[token] + 1)
            blocks = batch.block_table[request_of[token]][context // self.block_size]
            seen = self._cache[blocks.astype(np.int64) * self.block_size + context % self.block_size]
            state = _mix(np.bitwise_xor.reduce(seen)[None])
            row = _mix(state + np.arange(self.vocab_size, dtype=np.uint64))
            logits[i] = (row >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22)
            if batch.token_ids[token] == self.nan_after_token:
                logits[i] = np.nan
        return logits

    def _check(self, batch: StepBatch) -> None:
        assert batch.query_start[-1] == batch.num_tokens == len(batch.positions) == len(batch.slot_mapping)
        assert (batch.num_scheduled > 0).all() and np.array_equal(np.diff(batch.query_start), batch.num_scheduled)
        assert np.array_equal(batch.seq_lens, batch.num_computed + batch.num_scheduled)
        assert len(np.unique(batch.slot_mapping)) == batch.num_tokens, "two tokens are written to one cache slot"
        assert (batch.token_ids >= 0).all() and (batch.token_ids < self.vocab_size).all()
