"""Tiny random GGUF files, written with the gguf library in llama.cpp's row order."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.tiny_hf import LLAMA, random_weights
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, EOS_ID, SPECIAL_TOKENS, tiny_vocabulary

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(path: Path, *, kind: str = "Q8_0", seed: int = 0, **config: Any) -> dict[str, Any]:
    """Writes a whole GGUF, matrices as `kind` (ggml's type name), vectors as F32; `config` overwrites `LLAMA`.

    Returns the matrices and vectors by Hugging Face name in Hugging Face order, as float32 after quantization.
    """
    settings = {**LLAMA, **config}
    writer = gguf.GGUFWriter(path, settings["model_type"])
    write_metadata(writer, settings)
    write_tiny_vocabulary(writer)
    expected = {}
    for name, array in random_weights(settings, seed).items():
        stored_kind = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        expected[name] = gguf.dequantize(gguf.quantize(array, stored_kind), stored_kind).reshape(array.shape)
        stored = gguf.quantize(_permuted(name, array, settings), stored_kind)
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=stored_kind)
    close(writer)
    return expected


def write_metadata(writer: gguf.GGUFWriter, settings: dict[str, Any]) -> None:
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_key_length(settings["head_dim"])
    writer.add_rope_freq_base(settings["rope_theta"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])


def write_tiny_vocabulary(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    tokens, merges = tiny_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(CHAT_TEMPLATE)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{suffix}"


def _permuted(name: str, array: npt.NDArray[np.float32], settings: dict[str, Any]) -> npt.NDArray[np.float32]:
    """llama.cpp's order of q and k rows: within a head, row j * head_dim / 2 + i becomes row 2 * i + j."""
    heads = {"q_proj": settings["num_attention_heads"], "k_proj": settings["num_key_value_heads"]}
    part = name.split(".")[-2]
    if settings["model_type"] != "llama" or part not in heads:
        return array
    halves = array.reshape(heads[part], 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
