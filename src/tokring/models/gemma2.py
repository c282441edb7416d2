"""Gemma 2: norms on both sides of attention and MLP, weights stored minus one, soft caps, every other layer local."""

from dataclasses import replace

from tokring.checkpoint import ModelConfig
from tokring.models import llama
from tokring.models.plan import DecoderPlan


def plan(config: ModelConfig) -> DecoderPlan:
    """Missing soft caps mean Gemma 2's own; an explicit null means none."""
    return replace(
        llama.plan(config),
        attention_scale=float(config.raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        attention_soft_cap=float(config.raw.get("attn_logit_softcapping", 50.0) or 0.0),
        final_soft_cap=float(config.raw.get("final_logit_softcapping", 30.0) or 0.0),
        embedding_scale=config.hidden_size**0.5,
        norm_offset=1.0,
        mlp_norm="pre_feedforward_layernorm",
        attention_output_norm="post_attention_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
    )
