"""Phi-3 and Phi-4: Llama with fused projections, LongRoPE, and a rotation of only a part of each head in Phi-4."""

from dataclasses import replace

from tokring.checkpoint import ModelConfig
from tokring.models import llama
from tokring.models.plan import DecoderPlan


def plan(config: ModelConfig) -> DecoderPlan:
    """Older files call LongRoPE "su" or "yarn"."""
    result = replace(llama.plan(config), has_fused_projections=True)
    rope = dict(result.layers[0].rope)
    if rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    return replace(result, layers=tuple(replace(layer, rope=rope) for layer in result.layers))
