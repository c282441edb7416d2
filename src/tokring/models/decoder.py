"""Decoder: the forward pass all architectures share, over a batch of requests and a paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.step_batch import StepBatch
from tokring.models.activation import apply_activation
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
        query, key, value = self._project(step, batch.positions)
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
        return self.output(step.attended.padded)

    def _project(self, step: StepActivations, positions: NDArray[np.int32]) -> tuple[Float32, Float32, Float32]:
        """Rotated query [T, heads, head_dim] and key, value [T, kv_heads, head_dim]; slices of one array mostly."""
        qkv = (
            self.qkv(step.normed.padded)[: step.num_tokens].float().numpy().reshape(step.num_tokens, -1, self.head_dim)
        )
        num_rotated = self.num_heads + self.num_kv_heads
        rotated, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.query_norm is not None and self.key_norm is not None:
            rotated = self._normalize_heads(rotated, self.query_norm, self.key_norm)
        tokring_kernels.rope(rotated, self.rope.cos, self.rope.sin, positions)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], value

    def _normalize_heads(self, heads: Float32, query_norm: Float32, key_norm: Float32) -> Float32:
        """RMSNorm over each head of [T, heads + kv_heads, head_dim], in a new array."""
        result = np.empty(heads.shape, np.float32)
        for index in range(heads.shape[1]):
            weight = query_norm if index < self.num_heads else key_norm
            tokring_kernels.rms_norm(heads[:, index], weight, self.norm_eps, result[:, index])
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)); SwiGLU or GeGLU."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def forward(self, step: StepActivations) -> torch.Tensor:
        """step.normed -> [padded T, hidden]."""
        gate_up = self.gate_up(step.normed.padded)[: step.num_tokens]
        apply_activation(self.activation, gate_up, step.gated.array)
        return self.down(step.gated.padded)


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
        tokring_kernels.rms_norm(step.hidden_array, self.attention_norm, self.norm_eps, step.normed.array)
        self._join(step, self.attention.forward(step, batch, cache), self.attention_output_norm)
        tokring_kernels.rms_norm(step.hidden_array, self.mlp_norm, self.norm_eps, step.normed.array)
        self._join(step, self.mlp.forward(step), self.mlp_output_norm)

    def _join(self, step: StepActivations, result: torch.Tensor, norm: Float32 | None) -> None:
        result = result[: step.num_tokens]
        if norm is not None:
            step.branch.copy_(result)
            branch = step.branch.numpy()
            tokring_kernels.rms_norm(branch, norm, self.norm_eps, branch)
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
    embedding_scale: float  # 1 = none
    final_soft_cap: float  # 0 = none
    widths: WorkspaceWidths

    def forward(self, batch: StepBatch, caches: Sequence[LayerCache], workspace: Workspace) -> Float32:
        """Logits float32[len(batch.logits_index), vocab_size], freshly allocated."""
        step = workspace.activations(batch.num_tokens)
        step.hidden.copy_(torch.index_select(self.embedding, 0, torch.from_numpy(batch.token_ids)))
        if self.embedding_scale != 1.0:
            step.hidden.mul_(self.embedding_scale)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.forward(step, batch, cache)
        return self._logits(step.hidden_array[batch.logits_index], workspace)

    def _logits(self, hidden: Float32, workspace: Workspace) -> Float32:
        head_input = workspace.head_input(len(hidden))
        tokring_kernels.rms_norm(hidden, self.final_norm, self.norm_eps, head_input.array)
        logits: Float32 = self.head(head_input.padded)[: len(hidden)].float().numpy()
        if self.final_soft_cap:
            soft_cap(logits, np.float32(self.final_soft_cap))
        return logits

    def linears(self) -> list[Linear]:
        """Every linear, the head last."""
        of_layers = [
            linear
            for layer in self.layers
            for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        ]
        return [*of_layers, self.head]


def soft_cap(logits: Float32, cap: np.float32) -> None:
    """cap * tanh(logits / cap) in place. In numpy: torch's tanh has other bits in a vector's tail than in its body."""
    np.divide(logits, cap, out=logits)
    np.tanh(logits, out=logits)
    np.multiply(logits, cap, out=logits)
