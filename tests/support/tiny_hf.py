"""Tiny random Hugging Face checkpoints, written with numpy only."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.tiny_tokenizer import CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, tiny_tokenizer_json
from tokring.checkpoint.safetensors_writer import to_bfloat16, write_safetensors

#: config.json of a Llama with grouped heads; overwrite what a test needs.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
}


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """float32 weights of a Llama (or, by its model_type, Qwen2: biases; Qwen3: q and k norms)."""
    rng = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            shapes[f"{prefix}self_attn.{name}.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{prefix}self_attn.{name}.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, query)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    # Norms around one, matrices so that activations neither vanish nor explode.
    return {
        name: (
            np.float32(name.endswith("norm.weight"))
            + rng.standard_normal(shape, np.float32) * np.float32(0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        )
        for name, shape in shapes.items()
    }


def write_tiny_hf(
    directory: Path, *, dtype: str = "bfloat16", num_shards: int = 1, seed: int = 0, **config: Any
) -> Path:
    """Writes a whole checkpoint and returns `directory`; `config` overwrites entries of `LLAMA`."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {**LLAMA, **config}
    write_json(directory / "config.json", settings)
    write_json(directory / "generation_config.json", {"eos_token_id": EOS_ID, "temperature": 0.7, "do_sample": True})
    write_tiny_vocabulary(directory)
    weights = {name: as_dtype(array, dtype) for name, array in random_weights(settings, seed).items()}
    write_shards(directory, weights, num_shards)
    return directory


def write_tiny_vocabulary(directory: Path) -> None:
    (directory / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    write_json(directory / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE})


def as_dtype(array: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """`array` as it is stored: uint16 for "bfloat16"."""
    return to_bfloat16(array) if dtype == "bfloat16" else array.astype(dtype)


def write_shards(directory: Path, weights: Mapping[str, npt.NDArray[Any]], num_shards: int) -> None:
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", weights.items())
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = list(weights)[shard::num_shards]
        write_safetensors(directory / file_name, ((name, weights[name]) for name in names))
        weight_map |= dict.fromkeys(names, file_name)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
