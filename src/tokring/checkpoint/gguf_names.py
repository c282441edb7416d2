"""GGUF tensor names -> Hugging Face names, by architecture."""

from __future__ import annotations

import re

#: GGUF architecture -> Hugging Face model_type. Mistral's GGUFs call themselves llama.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

#: Architectures whose q and k rows llama.cpp's converter reorders, from rotate-halves to neighbouring pairs.
PERMUTED = frozenset({"llama"})

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PATTERN = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, None if there is none (rope_freqs.weight, experts, ...)."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return None
    layer, part, suffix = match.groups()
    if layer is None:
        return f"{_GLOBAL[part]}.{suffix}" if part in _GLOBAL else None
    return f"model.layers.{int(layer)}.{_LAYER[part]}.{suffix}" if part in _LAYER else None


def hf_names(names: list[str]) -> dict[str, str]:
    """Hugging Face name -> GGUF name, of those that have one."""
    return {target: name for name in names if (target := hf_name(name)) is not None}
