"""Decoder: the forward pass all architectures share, over a batch of requests and a paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.step_batch import StepBatch
from tokring.models.activation import apply_activation
from tokring.models.linear import Float32, Linear
from tokring.models.plan import Activation
from tokring.models.rope import RopeTables
from tokring.models.workspace import StepActivations, Workspace, WorkspaceWidths

LinearT = TypeVar("LinearT")  # a backend's linears: those of the CPU, or weights on a device


class LayerCache(NamedTuple):
    """One layer's KV cache in float32, bfloat16's bits or int8; int8 has scales."""

    keys: NDArray[Any]  # [num_blocks, kv_heads, 16, head_dim]
    values: NDArray[Any]
    key_scale: Float32 | None = None  # [num_blocks, kv_heads, 16]
    value_scale: Float32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Generic[LinearT]):
    """Grouped-query attention of one layer: weights and how it looks back."""

    qkv: LinearT
    output: LinearT
    query_norm: Float32 | None  # [head_dim]
    key_norm: Float32 | None
    rope: RopeTables
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int
    soft_cap: float
    norm_eps: float

    def forward(self: "Attention[Linear]", step: StepActivations, batch: StepBatch, cache: LayerCache) -> None:
        """step.normed -> step.branch; writes the KV of the step's tokens."""
        query, key, value = self._project(step, batch.positions)
        tokring_kernels.write_kv(
            key,
            value,
            cache.keys,
            cache.values,
            batch.slot_mapping,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )
        tokring_kernels.paged_attention(
            query,
            cache.keys,
            cache.values,
            batch.block_table,
            batch.query_start,
            batch.seq_lens,
            self.scale,
            step.attended.reshape(query.shape),
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )
        self.output.apply(step.attended, step.branch)

    def _project(
        self: "Attention[Linear]", step: StepActivations, positions: NDArray[np.int32]
    ) -> tuple[Float32, Float32, Float32]:
        """Rotated query [T, heads, head_dim] and key, value [T, kv_heads, head_dim]: slices of step.qkv."""
        self.qkv.apply(step.normed, step.qkv)
        qkv = step.qkv.reshape(len(step.qkv), -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = qkv[:, :num_rotated]
        if self.query_norm is not None and self.key_norm is not None:
            self._normalize_heads(rotated, self.query_norm, self.key_norm)
        tokring_kernels.rope(rotated, self.rope.cos, self.rope.sin, positions)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], qkv[:, num_rotated:]

    def _normalize_heads(self, heads: Float32, query_norm: Float32, key_norm: Float32) -> None:
        """RMSNorm over each head of [T, heads + kv_heads, head_dim], in place."""
        for index in range(heads.shape[1]):
            weight = query_norm if index < self.num_heads else key_norm
            tokring_kernels.rms_norm(heads[:, index], weight, self.norm_eps, heads[:, index])


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp(Generic[LinearT]):
    """down(activation(gate(x)) * up(x)); SwiGLU or GeGLU."""

    gate_up: LinearT
    down: LinearT
    activation: Activation

    def forward(self: "GatedMlp[Linear]", step: StepActivations) -> None:
        """step.normed -> step.branch."""
        self.gate_up.apply(step.normed, step.gate_up)
        apply_activation(self.activation, step.gate_up, step.gated)
        self.down.apply(step.gated, step.branch)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer(Generic[LinearT]):
    """Attention and MLP, each behind a norm and added to the residual stream (through a second norm in Gemma)."""

    attention: Attention[LinearT]
    mlp: GatedMlp[LinearT]
    attention_norm: Float32
    mlp_norm: Float32
    attention_output_norm: Float32 | None
    mlp_output_norm: Float32 | None
    norm_eps: float

    def forward(self: "DecoderLayer[Linear]", step: StepActivations, batch: StepBatch, cache: LayerCache) -> None:
        self._normalize(step.hidden, self.attention_norm, step.normed)
        self.attention.forward(step, batch, cache)
        self._join(step, self.attention_output_norm)
        self._normalize(step.hidden, self.mlp_norm, step.normed)
        self.mlp.forward(step)
        self._join(step, self.mlp_output_norm)

    def _join(self, step: StepActivations, norm: Float32 | None) -> None:
        """Adds the branch to the residual stream."""
        if norm is not None:
            self._normalize(step.branch, norm, step.branch)
        np.add(step.hidden, step.branch, out=step.hidden)

    def _normalize(self, x: Float32, weight: Float32, out: Float32) -> None:
        tokring_kernels.rms_norm(x, weight, self.norm_eps, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder(Generic[LinearT]):
    """Embedding, layers, final norm and head."""

    embedding: NDArray[Any]  # [vocab_size, hidden], float32 or bfloat16's bits
    layers: Sequence[DecoderLayer[LinearT]]
    final_norm: Float32
    head: LinearT
    norm_eps: float
    embedding_scale: float  # 1 = none
    final_soft_cap: float  # 0 = none
    widths: WorkspaceWidths

    def forward(
        self: "Decoder[Linear]", batch: StepBatch, caches: Sequence[LayerCache], workspace: Workspace
    ) -> Float32:
        """Logits float32[len(batch.logits_index), vocab_size] in the workspace's memory."""
        step = workspace.activations(batch.num_tokens)
        self._embed(batch.token_ids, step.hidden)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.forward(step, batch, cache)
        return self._logits(step.hidden[batch.logits_index], workspace)

    def _embed(self, token_ids: NDArray[np.int32], out: Float32) -> None:
        if self.embedding.dtype == np.uint16:
            np.left_shift(self.embedding[token_ids], 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            np.take(self.embedding, token_ids, axis=0, out=out, mode="clip")  # any other mode buffers; ids are valid
        if self.embedding_scale != 1.0:
            out *= np.float32(self.embedding_scale)

    def _logits(self: "Decoder[Linear]", hidden: Float32, workspace: Workspace) -> Float32:
        normed, logits = workspace.head_input(len(hidden)), workspace.logits(len(hidden))
        tokring_kernels.rms_norm(hidden, self.final_norm, self.norm_eps, normed)
        self.head.apply(normed, logits)
        if self.final_soft_cap:
            soft_cap(logits, np.float32(self.final_soft_cap))
        return logits


def soft_cap(logits: Float32, cap: np.float32) -> None:
    """cap * tanh(logits / cap) in place."""
    np.divide(logits, cap, out=logits)
    np.tanh(logits, out=logits)
    np.multiply(logits, cap, out=logits)
