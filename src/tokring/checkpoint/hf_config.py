"""config.json -> ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokring.checkpoint.errors import CheckpointError
from tokring.checkpoint.model_config import MAX_LAYERS, ModelConfig

#: What transformers assumes where config.json is silent, by model_type; "" is for all others.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0},
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "gemma": {"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {
        "max_position_embeddings": 131072, "head_dim": 256, "tie_word_embeddings": True, "rope_theta": 1e6,
    },
}  # fmt: skip


def parse_config(raw: Mapping[str, Any], path: Path, *, has_head: bool) -> ModelConfig:
    """ModelConfig of a config.json at `path`. Raises CheckpointError.

    `has_head`: whether the weights hold lm_head.weight; without it the head is tied, whatever config.json says.
    """
    architecture = raw.get("model_type")
    if not isinstance(architecture, str):
        raise CheckpointError(path, "has no model_type")
    _refuse_quantization(raw, path)
    known = {**_DEFAULTS[""], **_DEFAULTS.get(architecture, {}), **{k: v for k, v in raw.items() if v is not None}}
    try:
        return _build(architecture, known, raw, has_head)
    except KeyError as error:
        raise CheckpointError(path, f"has no {error.args[0]}") from None
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError) as error:
        raise CheckpointError(path, f"can't be used: {error}") from None


def _build(architecture: str, known: dict[str, Any], raw: Mapping[str, Any], has_head: bool) -> ModelConfig:
    _check_num_layers(known["num_hidden_layers"])
    num_heads = known["num_attention_heads"]
    rope_theta, rope_scaling = _rope(known)
    return ModelConfig(
        architecture=architecture,
        hidden_size=known["hidden_size"],
        intermediate_size=known["intermediate_size"],
        num_layers=known["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=known.get("num_key_value_heads", num_heads),
        head_dim=known["head_dim"] if "head_dim" in known else known["hidden_size"] // num_heads,
        vocab_size=known["vocab_size"],
        max_position_embeddings=known["max_position_embeddings"],
        rms_norm_eps=float(known["rms_norm_eps"]),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(known.get("tie_word_embeddings", False)) or not has_head,
        attention_bias=bool(known.get("attention_bias", architecture == "qwen2")),
        mlp_bias=bool(known.get("mlp_bias", False)),
        hidden_act=str(known.get("hidden_activation", known["hidden_act"])),
        sliding_window=_sliding_window(architecture, known),
        layer_types=_layer_types(architecture, known),
        raw=raw,
    )


def _check_num_layers(num_layers: Any) -> None:
    """Before anything is made per layer; ModelConfig checks the other numbers."""
    if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {num_layers!r}, needed is a whole number from 1 to {MAX_LAYERS}")


def _refuse_quantization(raw: Mapping[str, Any], path: Path) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            path, f"describes {method} weights, which aren't supported: use plain bf16/fp16/fp32 safetensors or a GGUF"
        )


def _rope(known: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    parameters = known.get("rope_parameters") or known.get("rope_scaling") or {}
    if isinstance(parameters.get("full_attention"), dict):  # one set per layer type; the other one stays in `raw`
        parameters = parameters["full_attention"]
    parameters = {key: value for key, value in parameters.items() if value is not None}
    theta = float(parameters.pop("rope_theta", known["rope_theta"]))
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    if kind == "default":
        return theta, None
    return theta, {"rope_type": str(kind), **parameters}


def _sliding_window(architecture: str, known: Mapping[str, Any]) -> int | None:
    if architecture.startswith("qwen") and not known.get("use_sliding_window", False):
        return None  # Qwen writes a window down even where it isn't used
    window = known.get("sliding_window")
    return None if window is None else int(window)


def _layer_types(architecture: str, known: Mapping[str, Any]) -> tuple[str, ...] | None:
    if known.get("layer_types") is not None:
        return tuple(str(kind) for kind in known["layer_types"])
    layers = range(known["num_hidden_layers"])
    if architecture == "gemma2":
        return tuple("full_attention" if layer % 2 else "sliding_attention" for layer in layers)
    if architecture == "gemma3_text":
        pattern = int(known.get("sliding_window_pattern", 6))
        return tuple("sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in layers)
    if architecture.startswith("qwen") and known.get("use_sliding_window", False):
        first = int(known.get("max_window_layers", 28))
        return tuple("sliding_attention" if layer >= first else "full_attention" for layer in layers)
    return None
