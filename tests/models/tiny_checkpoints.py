"""Test support: tiny random checkpoints of every architecture, made from transformers' own configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def long_rope(num_dimensions: int) -> dict[str, Any]:
    """LongRoPE factors that are far from one, so that the wrong set can't go unnoticed."""
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(num_dimensions)],
        "long_factor": [2.0 + 0.5 * i for i in range(num_dimensions)],
    }


def theta(rope: dict[str, Any], base: float = 10_000.0) -> dict[str, Any]:
    return {"rope_theta": base, **rope}


# name -> (configuration class, its arguments). Windows are shorter than the test's sequences.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-sizes": ("LlamaConfig", {"hidden_size": 60, "head_dim": 24, "intermediate_size": 52, "vocab_size": 131}),
    "llama-linear-rope": ("LlamaConfig", {"rope_parameters": theta({"rope_type": "linear", "factor": 2.0})}),
    "llama-llama3-rope": ("LlamaConfig", {"rope_parameters": theta(LLAMA3_ROPE, 500_000.0)}),
    "llama-yarn-rope": ("LlamaConfig", {"rope_parameters": theta(YARN_ROPE)}),
    "llama-dynamic-rope": ("LlamaConfig", {"rope_parameters": theta({"rope_type": "dynamic", "factor": 2.0})}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
    ),
    "phi3": ("Phi3Config", {}),
    "phi3-partial-longrope": (
        "Phi3Config",
        {
            "rope_parameters": {**long_rope(4), "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 128,
        },
    ),
}


#: What is served by the CUDA kernels, whose smallest heads have 64 dimensions.
WIDE: dict[str, dict[str, Any]] = {name: {"hidden_size": 256, "head_dim": 64} for name in MODELS} | {
    "phi3-partial-longrope": {
        "hidden_size": 256,
        "rope_parameters": {**long_rope(16), "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
}


def save_tiny_checkpoint(name: str, directory: Path, **changes: Any) -> Any:
    """Writes the checkpoint and returns transformers' model of it: float32, eager attention, no gradients."""
    config_class, arguments = MODELS[name]
    config = getattr(transformers, config_class)(**{**SIZES, **arguments, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
    randomize(model)
    model.save_pretrained(directory)
    vocabulary = {f"<{token}>": token for token in range(config.vocab_size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<0>")).save(str(directory / "tokenizer.json"))
    return model


def randomize(model: torch.nn.Module) -> None:
    """Weights large enough that attention is sharp and every norm and bias matters."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
        else:
            parameter.normal_(std=1.0 if "embed" in name else 2.0 / parameter.shape[1] ** 0.5)
