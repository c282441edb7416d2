"""DecoderPlan: what one architecture adds to the decoder that all of them share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh"]

# Hugging Face's activation names (config.json's hidden_act) that mean the same function here.
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer's attention: how far it looks back and how it rotates."""

    rope: Mapping[str, Any]  # parameters of tokring.models.rope; equal ones share their tables
    sliding_window: int = 0  # a token sees this many positions, its own included; 0 = all


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderPlan:
    """One model: per-layer plans, switches of the shared decoder, and names of the norms' weights."""

    layers: tuple[LayerPlan, ...]
    activation: Activation
    attention_scale: float
    attention_soft_cap: float = 0.0  # 0 = none; else scores become cap * tanh(score / cap)
    final_soft_cap: float = 0.0  # the same for the logits
    embedding_scale: float = 1.0
    norm_offset: float = 0.0  # added to every norm weight (Gemma stores weight - 1)
    has_head_norms: bool = False  # RMSNorm over each query and key head before the rotation
    has_fused_projections: bool = False  # the file holds qkv_proj and gate_up_proj in one
    mlp_norm: str = "post_attention_layernorm"
    attention_output_norm: str | None = None  # applied to the attention's output before it joins the residual
    mlp_output_norm: str | None = None
