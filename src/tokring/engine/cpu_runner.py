"""CpuRunner: executes a step on the CPU, with tokring's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tokring.checkpoint import Checkpoint
from tokring.engine.step_batch import StepBatch
from tokring.models.decoder import Decoder, LayerCache
from tokring.models.linear import ActivationBits, Linear
from tokring.models.loader import load_decoder
from tokring.models.native_decoder import native_decoder, run_native
from tokring.models.weights import WeightFormat, WeightReader
from tokring.models.workspace import Workspace

BLOCK_SIZE = 16
SCALE_BYTES = 4  # of a cached vector
DTypeName = Literal["auto", "float32", "bfloat16"]
KvCacheDType = Literal["auto", "bf16", "int8"]  # auto: bf16, in float32 with --dtype float32
# auto: as stored. float32 is the reference: it dequantizes everything.
WEIGHT_FORMATS: dict[DTypeName, WeightFormat] = {"auto": "stored", "float32": "float32", "bfloat16": "bfloat16"}


class CpuRunner:
    """A ModelRunner on the CPU. Not thread-safe. Invariant (DESIGN §5, promise B), as all kernels are."""

    is_invariant = True
    is_asynchronous: Literal[False] = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: DTypeName,
        max_model_len: int,
        max_num_batched_tokens: int,
        kv_cache_dtype: KvCacheDType = "auto",
        activation_bits: ActivationBits = 15,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Loads all weights. Raises CheckpointError or ModelError where the model can't be served.

        `activation_bits`: what activations are rounded to in front of quantized weights.
        """
        self.name = f"cpu, {WEIGHT_FORMATS[dtype]} weights"
        self._config = checkpoint.config
        automatic = np.float32 if dtype == "float32" else np.uint16  # uint16: bfloat16's bits
        self._cache_dtype = np.dtype({"auto": automatic, "bf16": np.uint16, "int8": np.int8}[kv_cache_dtype])
        self._decoder: Decoder[Linear] = load_decoder(
            checkpoint.config, WeightReader(checkpoint, WEIGHT_FORMATS[dtype], progress, activation_bits), max_model_len
        )
        self.vocab_size = self._decoder.head.num_outputs
        self._workspace = self._build_workspace(max_num_batched_tokens)
        self._caches: list[LayerCache] = []
        self._native = native_decoder(self._decoder)

    @property
    def runs_natively(self) -> bool:
        """Whether a step is one native call."""
        return self._native is not None

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers, keys and values."""
        vectors = self._config.num_layers * 2 * self._config.num_kv_heads * BLOCK_SIZE
        return vectors * (self._config.head_dim * self._cache_dtype.itemsize + (SCALE_BYTES if self._has_scales else 0))

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserves keys and values [num_blocks, kv_heads, 16, head_dim] per layer, mapped on first use."""
        shape = (num_blocks, self._config.num_kv_heads, BLOCK_SIZE, self._config.head_dim)

        def array() -> NDArray[Any]:
            return np.zeros(shape, self._cache_dtype)

        def scale() -> NDArray[np.float32] | None:
            return np.zeros(shape[:3], np.float32) if self._has_scales else None

        self._caches = [LayerCache(array(), array(), scale(), scale()) for _ in range(self._config.num_layers)]
        if self._native is not None:
            self._native.set_cache(*map(list, zip(*self._caches, strict=True)))

    @property
    def _has_scales(self) -> bool:
        return self._cache_dtype == np.int8

    def execute(self, batch: StepBatch) -> NDArray[np.float32]:
        """Writes the KV of every token, returns logits float32[len(batch.logits_index), vocab_size].

        They stay valid until the next call.
        """
        if not self._caches:
            raise RuntimeError("execute() before allocate_kv_cache()")
        if self._native is not None:
            return run_native(self._native, batch, self._workspace.logits(len(batch.logits_index)))
        needed = max(batch.num_tokens, len(batch.logits_index))
        if needed > self._workspace.capacity:
            self._workspace = self._build_workspace(needed)
        return self._decoder.forward(batch, self._caches, self._workspace)

    def warm_up(self) -> None:
        """Runs a decode step, which starts the workers and touches every weight; overwrites cache slot 0."""
        self.execute(warm_up_batch(1))

    def _build_workspace(self, num_tokens: int) -> Workspace:
        return Workspace(num_tokens, self._decoder.widths)


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
