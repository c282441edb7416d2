"""TorchRunner: executes a step with torch's linears and tokring's kernels on the CPU."""

import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tokring.checkpoint import Checkpoint, ModelConfig
from tokring.engine.step_batch import StepBatch
from tokring.models.decoder import LayerCache
from tokring.models.loader import load_decoder
from tokring.models.tile_sizes import choose_tile_sizes
from tokring.models.weights import WeightReader, num_weights
from tokring.models.workspace import Workspace

BLOCK_SIZE = 16
AUTO_FLOAT32_BYTES = 2 << 30
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHE_DTYPES: dict[str, np.dtype[Any]] = {  # uint16: bfloat16's bits
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
}
DTypeName = Literal["auto", "float32", "bfloat16"]


class TorchRunner:
    """A ModelRunner on the CPU. In float32 it is invariant, in bfloat16 about twice as fast.

    Not thread-safe; sets torch's number of threads for the whole process.
    """

    is_asynchronous = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: DTypeName,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_threads: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Loads all weights. Raises CheckpointError or ModelError where the model can't be served."""
        # One core is left to front end and kernel: an OpenMP team that shares a core waits whole time slices for it.
        num_threads = num_threads or max(1, available_cores() - 1)
        torch.set_num_threads(num_threads)
        self.dtype_name = resolve_dtype(dtype, checkpoint.config)
        self.name = f"torch {self.dtype_name}"
        torch_dtype = TORCH_DTYPES[self.dtype_name]
        with torch.inference_mode():
            reader = WeightReader(checkpoint, torch_dtype, progress)
            self._decoder = load_decoder(checkpoint.config, reader, max_model_len)
            self._tile_sizes = choose_tile_sizes(self._decoder.linears())
        self.is_invariant = self._tile_sizes.is_invariant
        self.vocab_size = self._decoder.head.num_outputs
        self._config = checkpoint.config
        self._workspace = self._build_workspace(max_num_batched_tokens)
        self._caches: list[LayerCache] = []

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers, keys and values."""
        elements = self._config.num_layers * 2 * self._config.num_kv_heads * BLOCK_SIZE * self._config.head_dim
        return elements * CACHE_DTYPES[self.dtype_name].itemsize

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserves keys and values [num_blocks, kv_heads, 16, head_dim] per layer, mapped on first use."""
        shape = (num_blocks, self._config.num_kv_heads, BLOCK_SIZE, self._config.head_dim)
        dtype = CACHE_DTYPES[self.dtype_name]
        self._caches = [(np.zeros(shape, dtype), np.zeros(shape, dtype)) for _ in range(self._config.num_layers)]

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> NDArray[np.float32]:
        """Writes the KV of every token, returns logits float32[len(batch.logits_index), vocab_size] of its own."""
        if not self._caches:
            raise RuntimeError("execute() before allocate_kv_cache()")
        needed = max(batch.num_tokens, len(batch.logits_index))
        if needed > self._workspace.capacity:
            self._workspace = self._build_workspace(needed)
        return self._decoder.forward(batch, self._caches, self._workspace)

    def warm_up(self) -> None:
        """Runs a decode step of every small batch size so that oneDNN compiles its kernels; overwrites cache slot 0."""
        for size in self._tile_sizes.sizes:
            self.execute(warm_up_batch(size))

    def _build_workspace(self, num_tokens: int) -> Workspace:
        return Workspace(num_tokens, self._decoder.widths, TORCH_DTYPES[self.dtype_name], self._tile_sizes)


def resolve_dtype(dtype: DTypeName, config: ModelConfig) -> Literal["float32", "bfloat16"]:
    """auto = float32 for small models, else bfloat16.

    A small model is hurt most by bfloat16's rounding (the embedded one misses the capital of France, where two answers
    are 0.1 apart), its float32 weights cost the least, and float32 makes answers independent of the batch.
    """
    if dtype == "auto":
        return "float32" if num_weights(config) * 4 <= AUTO_FLOAT32_BYTES else "bfloat16"
    return dtype


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def warm_up_batch(num_requests: int) -> StepBatch:
    """One token at position 0 for each request, all in cache slot 0."""
    zeros = np.zeros(num_requests, np.int32)
    ones = np.ones(num_requests, np.int32)
    indices = np.arange(num_requests, dtype=np.int32)
    return StepBatch(
        rows=indices,
        num_scheduled=ones,
        num_computed=zeros,
        query_start=np.arange(num_requests + 1, dtype=np.int32),
        token_ids=zeros,
        positions=zeros,
        slot_mapping=np.zeros(num_requests, np.int64),
        seq_lens=ones,
        block_table=np.zeros((num_requests, 1), np.int32),
        sample_index=indices,
        logits_index=indices,
    )
