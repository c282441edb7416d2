"""Rotary position embedding: the cos/sin tables of every scaling variant, computed once at load."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokring.checkpoint import ModelConfig
from tokring.models.errors import ModelError

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeTables:
    """cos and sin by position: float32[num_positions, rotary_dim / 2], attention factor included."""

    cos: Float32
    sin: Float32


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """The model's RoPE settings in one spelling: rope_theta, rope_type and what the type needs."""
    raw_parameters = config.raw.get("rope_parameters") or {}
    partial = raw_parameters.get("partial_rotary_factor") or config.raw.get("partial_rotary_factor") or 1.0
    original = config.raw.get("original_max_position_embeddings") or config.max_position_embeddings
    return {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": original,
        **(config.rope_scaling or {}),
    }


def build_rope_tables(parameters: Mapping[str, Any], config: ModelConfig, num_positions: int) -> RopeTables:
    """Tables for positions [0, num_positions). Raises ModelError for a scaling type that is not known.

    `num_positions` is the longest sequence the server admits: LongRoPE takes its long factors for all sequences or for
    none, by this length, so that a sequence keeps its rotation when it grows.
    """
    rotary_dim = int(config.head_dim * parameters["partial_rotary_factor"])
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    positions = np.arange(num_positions, dtype=np.float32)
    if parameters["rope_type"] == "dynamic":
        angles = dynamic_angles(parameters, exponents, positions, config.max_position_embeddings)
        return tables_from_angles(angles, 1.0)
    frequencies, attention_factor = inverse_frequencies(parameters, exponents, config, num_positions)
    return tables_from_angles(positions[:, None] * frequencies[None, :].astype(np.float32), attention_factor)


def tables_from_angles(angles: Float32, attention_factor: float) -> RopeTables:
    """Float32 angles (rounded as the reference implementations round them) to cos and sin."""
    wide = angles.astype(np.float64)
    return RopeTables(
        np.ascontiguousarray(np.cos(wide) * attention_factor, dtype=np.float32),
        np.ascontiguousarray(np.sin(wide) * attention_factor, dtype=np.float32),
    )


def inverse_frequencies(
    parameters: Mapping[str, Any], exponents: Float32, config: ModelConfig, num_positions: int
) -> tuple[Float32, float]:
    """float32[rotary_dim / 2] and the factor on cos and sin, for the types that don't depend on the position."""
    rope_type = parameters["rope_type"]
    plain: Float32 = (1.0 / np.float32(parameters["rope_theta"]) ** exponents).astype(np.float32)
    if rope_type == "default":
        return plain, 1.0
    if rope_type == "linear":
        return (plain / np.float32(parameters["factor"])).astype(np.float32), 1.0
    if rope_type == "llama3":
        return llama3_frequencies(parameters, plain), 1.0
    if rope_type == "yarn":
        return yarn_frequencies(parameters, plain), yarn_attention_factor(parameters)
    if rope_type == "frequency_factors":  # llama.cpp stores Llama 3's scaling as one divisor per dimension
        factors = np.asarray(parameters["frequency_factors"], dtype=np.float32)
        return (plain / factors).astype(np.float32), 1.0
    if rope_type in ("longrope", "su"):
        return longrope_frequencies(parameters, exponents, num_positions), longrope_attention_factor(parameters, config)
    raise ModelError(
        f"RoPE scaling type {rope_type!r} of {config.architecture} is not known; "
        "known are default, linear, dynamic, llama3, yarn and longrope"
    )


def dynamic_angles(
    parameters: Mapping[str, Any], exponents: Float32, positions: Float32, max_position_embeddings: int
) -> Float32:
    """Dynamic NTK: up to the trained length as without scaling, beyond it the base grows with the position.

    The reference takes the base of the *current* length for new tokens and leaves cached keys as they are, which is
    this table when a sequence grows token by token; a table makes it independent of how the prompt was chunked.
    """
    factor, rotary_dim = parameters["factor"], 2 * len(exponents)
    lengths = np.maximum(positions.astype(np.float64) + 1, max_position_embeddings)
    growth = factor * lengths / max_position_embeddings - (factor - 1)
    bases = parameters["rope_theta"] * growth ** (rotary_dim / (rotary_dim - 2))
    frequencies = 1.0 / bases.astype(np.float32)[:, None] ** exponents[None, :]
    angles: Float32 = (positions[:, None] * frequencies).astype(np.float32)
    return angles


def llama3_frequencies(parameters: Mapping[str, Any], plain: Float32) -> Float32:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp between."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelengths = 2 * math.pi / plain
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    blended: Float32 = ((1 - smooth) * plain / factor + smooth * plain).astype(np.float32)
    return blended


def yarn_frequencies(parameters: Mapping[str, Any], plain: Float32) -> Float32:
    """YaRN (arXiv 2309.00071): interpolate below beta_slow rotations, extrapolate above beta_fast, a ramp between."""
    dim, original = 2 * len(plain), parameters["original_max_position_embeddings"]

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp has no width: avoid 0 / 0
    extrapolated = 1 - np.clip((np.arange(len(plain), dtype=np.float32) - low) / (high - low), 0, 1)
    blended: Float32 = (plain / parameters["factor"] * (1 - extrapolated) + plain * extrapolated).astype(np.float32)
    return blended


def yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """The factor on cos and sin that makes up for the flatter attention of longer contexts."""
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])

    def mscale(weight: float) -> float:
        factor = parameters["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(parameters["mscale"]) / mscale(parameters["mscale_all_dim"])
    return mscale(1.0)


def longrope_frequencies(parameters: Mapping[str, Any], exponents: Float32, num_positions: int) -> Float32:
    """LongRoPE (arXiv 2402.13753): one factor per dimension, a short and a long set."""
    is_long = num_positions > parameters["original_max_position_embeddings"]
    factors = np.asarray(parameters["long_factor" if is_long else "short_factor"], dtype=np.float32)
    if factors.shape != exponents.shape:
        raise ModelError(f"LongRoPE has {len(factors)} factors, the rotary dimension needs {len(exponents)}")
    frequencies: Float32 = (1.0 / (factors * np.float32(parameters["rope_theta"]) ** exponents)).astype(np.float32)
    return frequencies


def longrope_attention_factor(parameters: Mapping[str, Any], config: ModelConfig) -> float:
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or config.max_position_embeddings / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
