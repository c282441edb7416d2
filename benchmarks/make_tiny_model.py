"""A model that costs nothing: `python benchmarks/make_tiny_model.py OUT_DIR [--vocab-size 512]`.

One Llama layer, hidden size 64, bfloat16, with the default model's vocabulary (or its first 512 tokens, so that head
and sampling cost nothing either). The weights are not noise: o_proj and down_proj are zero (the layer runs and
contributes nothing), embeddings are random vectors E of equal length, and the untied head has H[next(x)] = E[x].
Greedy decoding walks one fixed cycle over plain ASCII tokens: the same text on every engine, never a special token.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.checkpoint import Checkpoint, ModelConfig, open_checkpoint
from tokring.checkpoint.export import write_config, write_vocabulary
from tokring.checkpoint.safetensors_writer import to_bfloat16, write_safetensors

_HIDDEN, _INNER, _HEAD = 64, 128, 64
_FULL_VOCAB = 49152


def make_tiny_model(directory: Path, *, vocab_size: int = _FULL_VOCAB, source: Checkpoint | None = None) -> list[int]:
    """Writes the model as a Hugging Face directory. Returns the cycle: token ids in the order greedy decoding takes."""
    source = source or open_checkpoint(None)
    directory.mkdir(parents=True, exist_ok=True)
    write_vocabulary(source, directory)
    if vocab_size < source.config.vocab_size:
        _cut_vocabulary(directory / "tokenizer.json", vocab_size)
    write_config(source, _config(vocab_size), directory, dtype="bfloat16")
    cycle = np.random.default_rng(1234).permutation(_plain_ids(directory / "tokenizer.json")).tolist()
    weights = _weights(vocab_size, cycle)
    write_safetensors(directory / "model.safetensors", ((name, to_bfloat16(array)) for name, array in weights.items()))
    return [int(token) for token in cycle]


def _config(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=_HEAD,
        vocab_size=vocab_size,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
    )


def _cut_vocabulary(path: Path, vocab_size: int) -> None:
    """Keeps the tokens below `vocab_size` (special ones, all bytes, the first merges) and the merges among them."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if any(number >= vocab_size for token, number in model["vocab"].items() if len(token) == 1):
        raise ValueError(f"a vocabulary of {vocab_size} would lose single bytes")
    kept = {token: number for token, number in model["vocab"].items() if number < vocab_size}
    model["vocab"] = kept
    model["merges"] = [
        [left, right] for left, right in model["merges"] if left in kept and right in kept and left + right in kept
    ]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _plain_ids(path: Path) -> list[int]:
    """Ids of printable ASCII tokens ("Ġ" is a space), special ones left out."""
    tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    special = {token["id"] for token in tokenizer["added_tokens"]}
    return sorted(
        number
        for token, number in tokenizer["model"]["vocab"].items()
        if number not in special and all(character == "Ġ" or 33 <= ord(character) < 127 for character in token)
    )


def _weights(vocab_size: int, cycle: list[int]) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(1)
    embedding = rng.standard_normal((vocab_size, _HIDDEN), np.float32)
    embedding *= 8 / np.linalg.norm(embedding, axis=1, keepdims=True)
    head = np.zeros_like(embedding)
    head[cycle[1:] + cycle[:1]] = embedding[cycle]

    def noise(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(0.02)

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": embedding,
        layer + "input_layernorm.weight": np.ones(_HIDDEN, np.float32),
        layer + "self_attn.q_proj.weight": noise(_HEAD, _HIDDEN),
        layer + "self_attn.k_proj.weight": noise(_HEAD, _HIDDEN),
        layer + "self_attn.v_proj.weight": noise(_HEAD, _HIDDEN),
        layer + "self_attn.o_proj.weight": np.zeros((_HIDDEN, _HEAD), np.float32),
        layer + "post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
        layer + "mlp.gate_proj.weight": noise(_INNER, _HIDDEN),
        layer + "mlp.up_proj.weight": noise(_INNER, _HIDDEN),
        layer + "mlp.down_proj.weight": np.zeros((_HIDDEN, _INNER), np.float32),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
        "lm_head.weight": head,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument(
        "--vocab-size", type=int, default=_FULL_VOCAB, help="%(default)s, or 512 (default: %(default)s)"
    )
    options = parser.parse_args()
    make_tiny_model(options.directory, vocab_size=options.vocab_size)
