"""ModelRunner: what EngineCore asks of a backend."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokring.engine.step_batch import StepBatch


class ModelRunner(Protocol):
    """Executes one step's tokens against a paged KV cache. It keeps no state per request: rows move between steps."""

    name: str
    is_invariant: bool  # same bits for a row whatever else is in the batch (DESIGN §5, promise B)
    is_asynchronous: bool  # execute() only launches; always False for backends of the step thread
    vocab_size: int

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers, keys and values."""
        ...

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserve the KV cache; called once, before the first execute."""
        ...

    def warm_up(self) -> None:
        """Pay one-time costs (kernel compilation) before the first request; called after allocate_kv_cache."""
        ...

    def execute(self, batch: StepBatch) -> NDArray[np.float32]:
        """Write the KV of every token of `batch`, return logits float32[len(batch.logits_index), vocab_size].

        The result is the runner's writable scratch, valid until the next call.
        """
        ...
