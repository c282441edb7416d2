"""`python -m tokring.checkpoint.export OUT_DIR`: a GGUF as a Hugging Face directory, for other programs to read.

The weights are the dequantized ones (float32, or rounded to bfloat16), the tokenizer is the one tokring builds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tokring.checkpoint.errors import CheckpointError
from tokring.checkpoint.model_config import ModelConfig
from tokring.checkpoint.safetensors_writer import to_bfloat16, write_safetensors

_CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def export(checkpoint: Checkpoint, directory: Path, *, dtype: str = "bfloat16") -> None:
    """Writes `checkpoint` into `directory` (made if needed); `dtype` is "bfloat16" or "float32"."""
    directory.mkdir(parents=True, exist_ok=True)
    write_vocabulary(checkpoint, directory)
    write_config(checkpoint, checkpoint.config, directory, dtype=dtype)
    write_safetensors(directory / "model.safetensors", _tensors(checkpoint, dtype))


def write_vocabulary(checkpoint: Checkpoint, directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    checkpoint.load_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **checkpoint.special_tokens,
    }
    _write_json(directory / "tokenizer_config.json", settings)
    if checkpoint.chat_template is not None:
        (directory / "chat_template.jinja").write_text(checkpoint.chat_template, encoding="utf-8")


def write_config(checkpoint: Checkpoint, config: ModelConfig, directory: Path, *, dtype: str) -> None:
    """config.json of `config` and generation_config.json, special tokens as in `checkpoint`."""
    eos_ids = list(checkpoint.eos_ids)
    special = {"bos_token_id": checkpoint.bos_id, "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids}
    _write_json(directory / "config.json", {**_config_json(config), **special, "dtype": dtype, "torch_dtype": dtype})
    _write_json(directory / "generation_config.json", {**special, **checkpoint.generation_defaults})


def _config_json(config: ModelConfig) -> dict[str, Any]:
    scaling = dict(config.rope_scaling or {"rope_type": "default"})
    return {
        "architectures": [_CLASS_NAMES[config.architecture]],
        "model_type": config.architecture,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        # Both spellings: transformers 5 reads rope_parameters, older programs the other two.
        "rope_parameters": {"rope_theta": config.rope_theta, **scaling},
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": config.hidden_act,
        "use_cache": True,
    }


def _tensors(checkpoint: Checkpoint, dtype: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for name in checkpoint.tensor_names():
        array = checkpoint.tensor(name)
        if array.dtype == np.uint16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        yield name, to_bfloat16(array) if dtype == "bfloat16" else array.astype(np.float32, copy=False)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tokring.checkpoint.export", description=(__doc__ or "").strip())
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--model", help="GGUF file or Hugging Face directory (default: the embedded model)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args(arguments)
    try:
        export(open_checkpoint(options.model), options.directory, dtype=options.dtype)
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
