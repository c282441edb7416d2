"""Decoder: the forward pass all architectures share, over a batch of requests and a paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.step_batch import StepBatch
from tokring.models.linear import Linear
from tokring.models.plan import Activation
from tokring.models.rope import RopeTables
from tokring.models.workspace import StepActivations, Workspace, WorkspaceWidths

Float32 = NDArray[np.float32]
LayerCache = tuple[NDArray[np.generic], NDArray[np.generic]]  # keys, values: [num_blocks, kv_heads, 16, head_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention of one layer: weights and how it looks back."""

    qkv: Linear
    output: Linear
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

    def forward(self, step: StepActivations, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """step.normed -> [padded T, hidden]; writes the KV of the step's tokens."""
        query, key, value = self._project(step)
        if self.query_norm is not None and self.key_norm is not None:
            tokring_kernels.rms_norm(query, self.query_norm, self.norm_eps, query)
            tokring_kernels.rms_norm(key, self.key_norm, self.norm_eps, key)
        tokring_kernels.rope(query, key, batch.positions, self.rope.cos, self.rope.sin)
        tokring_kernels.write_kv(key, value, *cache, batch.slot_mapping)
        tokring_kernels.paged_attention(
            query,
            *cache,
            batch.block_table,
            batch.query_start,
            batch.seq_lens,
            self.scale,
            step.attended.array.reshape(query.shape),
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )
        return self.output(step.attended.as_input())

    def _project(self, step: StepActivations) -> tuple[Float32, Float32, Float32]:
        """Query [T, heads, head_dim], key and value [T, kv_heads, head_dim], float32."""
        qkv = self.qkv(step.normed.as_input())[: step.num_tokens]
        query_width, key_width = step.query.shape[1], step.key.shape[1]
        step.query.copy_(qkv[:, :query_width])
        step.key.copy_(qkv[:, query_width : query_width + key_width])
        step.value.copy_(qkv[:, query_width + key_width :])
        return (
            step.query.numpy().reshape(-1, self.num_heads, self.head_dim),
            step.key.numpy().reshape(-1, self.num_kv_heads, self.head_dim),
            step.value.numpy().reshape(-1, self.num_kv_heads, self.head_dim),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)); SwiGLU or GeGLU."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def forward(self, step: StepActivations) -> torch.Tensor:
        """step.normed -> [padded T, hidden]."""
        step.gate_up.copy_(self.gate_up(step.normed.as_input())[: step.num_tokens])
        multiply = tokring_kernels.silu_mul if self.activation == "silu" else tokring_kernels.gelu_tanh_mul
        multiply(step.gate_up.numpy(), step.gated.array)
        return self.down(step.gated.as_input())


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual stream (through a second norm in Gemma)."""

    attention: Attention
    mlp: GatedMlp
    attention_norm: Float32
    mlp_norm: Float32
    attention_output_norm: Float32 | None
    mlp_output_norm: Float32 | None
    norm_eps: float

    def forward(self, step: StepActivations, batch: StepBatch, cache: LayerCache) -> None:
        tokring_kernels.rms_norm(step.hidden.numpy(), self.attention_norm, self.norm_eps, step.normed.array)
        self._join(step, self.attention.forward(step, batch, cache), self.attention_output_norm)
        tokring_kernels.rms_norm(step.hidden.numpy(), self.mlp_norm, self.norm_eps, step.normed.array)
        self._join(step, self.mlp.forward(step), self.mlp_output_norm)

    def _join(self, step: StepActivations, result: torch.Tensor, norm: Float32 | None) -> None:
        result = result[: step.num_tokens]
        if norm is not None:
            step.branch.copy_(result)
            tokring_kernels.rms_norm(step.branch.numpy(), norm, self.norm_eps, step.branch.numpy())
            result = step.branch
        step.hidden.add_(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Embedding, layers, final norm and head."""

    embedding: torch.Tensor  # dtype[vocab_size, hidden]
    layers: Sequence[DecoderLayer]
    final_norm: Float32
    head: Linear
    norm_eps: float
    embedding_scale: float
    final_soft_cap: float
    widths: WorkspaceWidths

    def forward(self, batch: StepBatch, caches: Sequence[LayerCache], workspace: Workspace) -> Float32:
        """Logits float32[len(batch.logits_index), vocab_size], freshly allocated."""
        step = workspace.views(batch.num_tokens)
        step.hidden.copy_(torch.index_select(self.embedding, 0, torch.from_numpy(batch.token_ids)))
        if self.embedding_scale != 1.0:
            step.hidden.mul_(self.embedding_scale)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.forward(step, batch, cache)
        return self._logits(step.hidden.numpy(), batch.logits_index, workspace)

    def _logits(self, hidden: Float32, logits_index: NDArray[np.int32], workspace: Workspace) -> Float32:
        selected = workspace.selected(len(logits_index))
        np.take(hidden, logits_index, axis=0, out=selected.array)
        tokring_kernels.rms_norm(selected.array, self.final_norm, self.norm_eps, selected.array)
        logits: Float32 = self.head(selected.as_input())[: len(logits_index)].float().numpy()
        if self.final_soft_cap:
            # numpy, not torch: torch's tanh gives an element other bits in a vector's tail than in its body
            np.divide(logits, np.float32(self.final_soft_cap), out=logits)
            np.tanh(logits, out=logits)
            np.multiply(logits, np.float32(self.final_soft_cap), out=logits)
        return logits

    def linears(self) -> list[Linear]:
        """Every linear, the head last."""
        of_layers = [
            linear
            for layer in self.layers
            for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        ]
        return [*of_layers, self.head]
