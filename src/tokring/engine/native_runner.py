"""NativeRunner: executes a step in one native call, on weights as they are stored. No torch."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.checkpoint import Checkpoint
from tokring.engine.step_batch import StepBatch
from tokring.models.native_loader import load_native_decoder

BLOCK_SIZE = tokring_kernels.BLOCK_SIZE


class NativeRunner:
    """A ModelRunner on the CPU; invariant in every dtype. Not thread-safe."""

    is_asynchronous = False
    is_invariant = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        max_model_len: int,
        num_threads: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Loads all weights; dtype "bfloat16" keeps the KV cache in bfloat16, any other in float32.

        Raises CheckpointError or ModelError where the model can't be served; ask why_not_native first.
        """
        if num_threads is not None:
            tokring_kernels.set_num_threads(num_threads)
        self._config = checkpoint.config
        self._decoder = load_native_decoder(checkpoint, max_model_len, progress)
        self._cache_dtype = np.dtype(np.uint16 if dtype == "bfloat16" else np.float32)
        self._logits = np.empty((0, checkpoint.config.vocab_size), np.float32)
        self.vocab_size = checkpoint.config.vocab_size
        self.name = f"native {tokring_kernels.level()}"

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers, keys and values."""
        config = self._config
        elements = config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim
        return elements * self._cache_dtype.itemsize

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserves keys and values [num_blocks, kv_heads, 16, head_dim] per layer, mapped on first use."""
        shape = (num_blocks, self._config.num_kv_heads, BLOCK_SIZE, self._config.head_dim)
        caches = [np.zeros(shape, self._cache_dtype) for _ in range(2 * self._config.num_layers)]
        self._decoder.set_cache(caches[::2], caches[1::2])

    def warm_up(self) -> None:
        """Nothing is compiled at run time."""

    def execute(self, batch: StepBatch) -> NDArray[np.float32]:
        """Writes the KV of every token, returns logits float32[len(batch.logits_index), vocab_size]."""
        num_logits = len(batch.logits_index)
        if num_logits > len(self._logits):
            self._logits = np.empty((num_logits, self.vocab_size), np.float32)
        logits = self._logits[:num_logits]
        self._decoder.run(
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.block_table,
            batch.query_start,
            batch.seq_lens,
            batch.logits_index,
            logits,
        )
        return logits
