"""GGUF metadata -> ModelConfig."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.checkpoint.errors import CheckpointError
from tokring.checkpoint.gguf_file import GgufFile
from tokring.checkpoint.gguf_names import ARCHITECTURES
from tokring.checkpoint.model_config import ModelConfig

_ROPE_FACTORS = "rope_freqs.weight"


def parse_metadata(file: GgufFile) -> ModelConfig:
    """ModelConfig of a GGUF. Raises CheckpointError."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(file.path, f"has the architecture {architecture!r}; supported are {known}")
    try:
        return _build(file, architecture)
    except KeyError as error:
        raise CheckpointError(file.path, f"has no metadata {error.args[0]}") from None
    except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise CheckpointError(file.path, f"can't be used: {error}") from None


def _build(file: GgufFile, architecture: str) -> ModelConfig:
    values = {
        key.removeprefix(architecture + "."): value
        for key, value in file.metadata.items()
        if key.startswith(architecture + ".")
    }
    if _whole(values, "expert_count", 0):
        raise ValueError("it is a mixture of experts, which isn't supported")
    num_heads = _whole(values, "attention.head_count")
    hidden_size = _whole(values, "embedding_length")
    head_dim = _whole(values, "attention.key_length", hidden_size // num_heads)
    if _whole(values, "rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"rope.dimension_count {values['rope.dimension_count']} differs from head_dim {head_dim}")
    return ModelConfig(
        architecture=ARCHITECTURES[architecture],
        hidden_size=hidden_size,
        intermediate_size=_whole(values, "feed_forward_length"),
        num_layers=_whole(values, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_whole(values, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(file),
        max_position_embeddings=_whole(values, "context_length"),
        # Both are stored as float32: 9.999999747378752e-06 was 1e-5.
        rms_norm_eps=_shortest(values["attention.layer_norm_rms_epsilon"]),
        rope_theta=_shortest(values.get("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(file, values, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        sliding_window=_whole(values, "attention.sliding_window") if "attention.sliding_window" in values else None,
        raw={key: value for key, value in file.metadata.items() if isinstance(value, (bool, int, float, str))},
    )


def _whole(values: dict[str, Any], name: str, default: int | None = None) -> int:
    """A number; an array of equal numbers (one per layer) counts as one."""
    value = values[name] if default is None else values.get(name, default)
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        value = value[0].item()
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}, needed is one whole number")
    return value


def _shortest(value: float) -> float:
    """The number with the fewest digits that is the same float32."""
    with np.errstate(over="ignore"):  # infinity, which ModelConfig refuses
        return float(str(np.float32(value)))


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("there is no matrix token_embd.weight")
    return embedding.shape[0]


def _rope_scaling(file: GgufFile, values: dict[str, Any], head_dim: int) -> dict[str, Any] | None:
    kind = str(values.get("rope.scaling.type", "none"))
    if _ROPE_FACTORS in file.tensors:
        return _factor_scaling(file, head_dim)
    if kind == "none":
        return None
    factor = _shortest(values["rope.scaling.factor"])
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        if "rope.scaling.original_context_length" in values:
            scaling["original_max_position_embeddings"] = _whole(values, "rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in values:
                scaling[name] = _shortest(values[f"rope.scaling.yarn_{name}"])
        return scaling
    raise ValueError(f"rope.scaling.type {kind!r} isn't supported")


def _factor_scaling(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """What the converter made of Llama 3's scaling: a divisor per frequency."""
    tensor = file.tensors[_ROPE_FACTORS]
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise ValueError(f"{_ROPE_FACTORS} is {tensor.kind} of shape {tensor.shape}, needed is F32 ({head_dim // 2},)")
    factors = file.array(tensor, np.float32, tensor.shape)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ValueError(f"{_ROPE_FACTORS} holds numbers that are not positive")
    theta = _shortest(file.metadata.get("llama.rope.freq_base", 10000.0))
    return _llama3_scaling(factors, theta) or {
        "rope_type": "frequency_factors",
        "frequency_factors": [float(factor) for factor in factors],
    }


def _llama3_scaling(factors: npt.NDArray[np.float32], theta: float) -> dict[str, Any] | None:
    """Llama 3.1's parameters if they explain the divisors: the numbers themselves are more exact than float32 factors.

    The formula is that of transformers' modeling_rope_utils (rope_type "llama3"); all published models share the three
    constants.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors.max())
    wavelength = 2 * np.pi * theta ** (np.arange(factors.size) / factors.size)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-5):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
