"""ModelConfig: a decoder's shape, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder-only model.

    `architecture` is Hugging Face's model_type ("llama", "qwen2", ...). `rope_scaling` is None or Hugging Face's dict
    with its "rope_type" always filled; besides theirs there is rope_type "frequency_factors" (from a GGUF's
    rope_freqs tensor) with "frequency_factors": head_dim / 2 divisors of the inverse frequencies.
    `attention_bias` says whether q, k and v have biases. `layer_types` is None (all layers alike) or one of
    "full_attention" / "sliding_attention" per layer. `raw` is the config.json, or the GGUF's scalar metadata.

    Raises ValueError on numbers no model can have.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ValueError(f"{name} is {value!r}, needed is a whole number from 1 to {limit}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd")
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps!r}, needed is a number between 0 and 1")
        if not 0 < self.rope_theta < float("inf"):
            raise ValueError(f"rope_theta is {self.rope_theta!r}, needed is a positive number")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window!r}, needed is a positive number")
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_layers} layers")

    @property
    def num_linear_weights(self) -> int:
        """Weights of all layers' matrices: the multiplications of one token, but for attention and the head."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


MAX_LAYERS = 1 << 12
#: Far above every known model; a damaged header must not make anybody allocate by it.
_LIMITS = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": MAX_LAYERS,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
}
