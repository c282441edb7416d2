"""Llama (and whatever has its shape: SmolLM, Yi, TinyLlama, ...): the plain decoder."""

from tokring.checkpoint import ModelConfig
from tokring.models.errors import ModelError
from tokring.models.plan import ACTIVATIONS, DecoderPlan, LayerPlan
from tokring.models.rope import rope_parameters


def plan(config: ModelConfig) -> DecoderPlan:
    """Every layer sees everything, or `sliding_window` positions where the configuration says so."""
    if config.hidden_act not in ACTIVATIONS:
        raise ModelError(f"hidden_act {config.hidden_act!r} is not known; known are {', '.join(ACTIVATIONS)}")
    rope = rope_parameters(config)
    return DecoderPlan(
        layers=tuple(LayerPlan(rope=rope, sliding_window=layer_window(config, i)) for i in range(config.num_layers)),
        activation=ACTIVATIONS[config.hidden_act],
        attention_scale=config.head_dim**-0.5,
    )


def layer_window(config: ModelConfig, layer: int) -> int:
    """Positions that a layer's tokens see; 0 = all. Without layer types the model's window holds for all layers."""
    if config.sliding_window is None:
        return 0
    if config.layer_types is not None and config.layer_types[layer] != "sliding_attention":
        return 0
    return config.sliding_window
