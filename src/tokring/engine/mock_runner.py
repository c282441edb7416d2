"""MockRunner: `--engine mock`: no model, step times by profile, token ids that depend on their sequence only."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokring.engine.step_batch import StepBatch

_LIKELIEST = 50.0  # logit
_BLOCK_BYTES = 1024  # nothing is stored; a size so that the KV pool can be reckoned with


class MockRunner:
    """Sleeps as long as a step is said to take and makes token ids up: greedy ones by the last token and its position.

    Everything around it (scheduler, KV bookkeeping, sampling, rings, front end) is the real thing.
    """

    name = "mock"
    is_invariant = True
    is_asynchronous: Literal[False] = False

    def __init__(
        self,
        vocab_size: int,
        *,
        max_rows: int,
        step_ms: float = 0.0,
        prefill_tokens_per_s: float = 0.0,
        banned_ids: tuple[int, ...] = (),
    ) -> None:
        """`banned_ids` (end-of-text ids) never come out by themselves; prefill_tokens_per_s 0: prompts cost nothing."""
        self.vocab_size = vocab_size
        self._step_s = step_ms / 1e3
        self._prefill_s = 1.0 / prefill_tokens_per_s if prefill_tokens_per_s > 0 else 0.0
        self._choices = np.setdiff1d(np.arange(vocab_size), np.array(banned_ids, np.int64))
        if not len(self._choices):
            raise ValueError("the vocabulary has nothing but end-of-text tokens")
        self._max_rows = max_rows
        self._logits = np.zeros((max_rows, vocab_size), np.float32)

    def kv_bytes_per_block(self) -> int:
        """Return a nominal size: there is no cache."""
        return _BLOCK_BYTES

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserve nothing."""

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def execute(self, batch: StepBatch) -> NDArray[np.float32]:
        """Return logits that are 0 but for two tokens of each row, as long after the call as the step is to take."""
        started_s = time.monotonic()
        count = len(batch.logits_index)
        if count > len(self._logits):
            self._logits = np.zeros((count, self.vocab_size), np.float32)
        logits = self._logits[:count]
        logits.fill(0.0)
        tokens = batch.token_ids[batch.logits_index].astype(np.uint64)
        state = (tokens + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state ^= (batch.positions[batch.logits_index].astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(32)
        # Two candidates, so that sampling has something to draw: at temperature 1 the second one in every fourth case.
        candidates = np.stack((state >> np.uint64(40), state)) % np.uint64(len(self._choices))
        for candidate, logit in zip(self._choices[candidates], (_LIKELIEST - 1.0, _LIKELIEST), strict=True):
            logits[np.arange(count), candidate] = logit
        delay_s = self._step_s + self._prefill_s * (batch.num_tokens - batch.num_requests)
        # Writing the logits (of 128 rows: milliseconds) stands for a part of the model's work, it does not come on top.
        delay_s -= time.monotonic() - started_s
        if delay_s > 0:
            time.sleep(delay_s)
        return logits
