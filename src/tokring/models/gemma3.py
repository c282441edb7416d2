"""Gemma 3 (text): Gemma 2 with head norms instead of soft caps, five local layers to a global one, two RoPE bases."""

from dataclasses import replace
from typing import Any

from tokring.checkpoint import ModelConfig
from tokring.models import gemma2
from tokring.models.plan import DecoderPlan


def plan(config: ModelConfig) -> DecoderPlan:
    result = gemma2.plan(config)
    local = local_rope(config)
    return replace(
        result,
        layers=tuple(replace(layer, rope=local if layer.sliding_window else layer.rope) for layer in result.layers),
        attention_soft_cap=float(config.raw.get("attn_logit_softcapping") or 0.0),
        final_soft_cap=float(config.raw.get("final_logit_softcapping") or 0.0),
        has_head_norms=True,
    )


def local_rope(config: ModelConfig) -> dict[str, Any]:
    """Local layers rotate by a smaller base and know no scaling."""
    of_local_layers = (config.raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta = of_local_layers.get("rope_theta") or config.raw.get("rope_local_base_freq") or 10_000.0
    return {"rope_type": "default", "rope_theta": float(theta), "partial_rotary_factor": 1.0, **of_local_layers}
