"""Qwen3: Llama with an RMSNorm over each query and key head."""

from dataclasses import replace

from tokring.checkpoint import ModelConfig
from tokring.models import llama
from tokring.models.plan import DecoderPlan


def plan(config: ModelConfig) -> DecoderPlan:
    return replace(llama.plan(config), has_head_norms=True)
