"""RoPE tables against transformers' formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.tiny_checkpoints import LLAMA3_ROPE, YARN_ROPE, long_rope
from tokring.checkpoint import ModelConfig
from tokring.models.errors import ModelError
from tokring.models.rope import build_rope_tables, rope_parameters

HEAD_DIM = 32
TRAINED = 256


def model_config(rope_scaling: dict[str, Any] | None, **raw: Any) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        hidden_size=128,
        intermediate_size=256,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=HEAD_DIM,
        vocab_size=100,
        max_position_embeddings=TRAINED,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=rope_scaling,
        raw=raw,
    )


def reference_tables(
    scaling: dict[str, Any], length: int, positions: torch.Tensor, **arguments: Any
) -> tuple[Any, Any]:
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_theta": 10_000.0, **scaling},
        **arguments,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=length)
    angles = positions[:, None].float() * frequencies[None]
    return (angles.cos() * factor).numpy(), (angles.sin() * factor).numpy()


LONG_ROPE = {**long_rope(HEAD_DIM // 2), "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("scaling", "num_positions"),
    [
        ({"rope_type": "linear", "factor": 3.0}, TRAINED),
        (LLAMA3_ROPE, TRAINED),
        (YARN_ROPE, TRAINED),
        ({**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16, "truncate": False}, TRAINED),
        ({**YARN_ROPE, "attention_factor": 1.7}, TRAINED),
        (LONG_ROPE, 64),
        (LONG_ROPE, TRAINED),
        ({"rope_type": "dynamic", "factor": 2.0}, TRAINED),
    ],
    ids=["linear", "llama3", "yarn", "yarn-mscale", "yarn-factor", "longrope-short", "longrope-long", "dynamic"],
)
def test_tables_equal_those_of_transformers(scaling: dict[str, Any], num_positions: int) -> None:
    config = model_config(scaling)
    tables = build_rope_tables(rope_parameters(config), config, num_positions)
    cos, sin = reference_tables(scaling, num_positions, torch.arange(num_positions))
    assert np.abs(tables.cos - cos).max() < 1e-4
    assert np.abs(tables.sin - sin).max() < 1e-4


def test_dynamic_scaling_takes_each_position_as_the_newest_of_its_sequence() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    config = model_config(scaling)
    tables = build_rope_tables(rope_parameters(config), config, 2 * TRAINED)
    for position in (TRAINED - 1, TRAINED, 300, 511):
        cos, _ = reference_tables(scaling, position + 1, torch.tensor([position]))
        assert np.abs(tables.cos[position] - cos[0]).max() < 1e-4


def test_a_gguf_frequency_factor_divides_its_dimension() -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2)
    config = model_config({"rope_type": "frequency_factors", "frequency_factors": factors})
    tables = build_rope_tables(rope_parameters(config), config, 10)
    frequencies = 10_000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM) / factors
    assert np.abs(tables.cos[9] - np.cos(9 * frequencies)).max() < 1e-5


def test_only_a_part_of_the_head_is_rotated_where_the_config_says_so() -> None:
    config = model_config(None, partial_rotary_factor=0.5)
    tables = build_rope_tables(rope_parameters(config), config, 4)
    assert tables.cos.shape == (4, HEAD_DIM // 4)


def test_an_unknown_scaling_type_is_refused_by_name() -> None:
    config = model_config({"rope_type": "spiral"})
    with pytest.raises(ModelError, match="'spiral'.*known are"):
        build_rope_tables(rope_parameters(config), config, 4)
