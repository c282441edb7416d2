"""Checkpoint: a model's files, whichever of the two formats they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy.typing as npt

from tokring.checkpoint.embedded_model import embedded_model_path
from tokring.checkpoint.errors import CheckpointError
from tokring.checkpoint.gguf_config import parse_metadata
from tokring.checkpoint.gguf_file import GgufFile
from tokring.checkpoint.gguf_tensors import GgufTensors
from tokring.checkpoint.gguf_vocabulary import GgufVocabulary
from tokring.checkpoint.hf_config import parse_config
from tokring.checkpoint.hf_vocabulary import HfVocabulary, read_generation_defaults, read_model_config
from tokring.checkpoint.json_file import read_optional_object, read_text
from tokring.checkpoint.model_config import ModelConfig
from tokring.checkpoint.quantized_tensor import QuantizedTensor
from tokring.checkpoint.safetensors_shards import SafetensorsShards
from tokring.checkpoint.tensor_source import TensorSource
from tokring.checkpoint.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened model. Weights stay in the mapped files until asked for; every method may raise CheckpointError."""

    name: str
    path: Path
    format: Literal["hf", "gguf"]
    config: ModelConfig
    #: Sampling numbers that the model's authors advise, under Hugging Face's names (temperature, top_p, ...).
    generation_defaults: Mapping[str, float | int]
    tensors: TensorSource
    vocabulary: Vocabulary
    #: The user's own template, if one was given.
    chat_template_override: str | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes that the weights take in the files."""
        return self.tensors.total_bytes

    def tensor_names(self) -> Sequence[str]:
        """Hugging Face names: model.layers.0.self_attn.q_proj.weight, ... (no lm_head.weight if the head is tied)."""
        return self.tensors.names

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """float32, float16 or uint16 (bfloat16's bits); often a read-only view. GGUF blocks come dequantized to f32."""
        return self.tensors.tensor(name)

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Raw Q4_0, Q4_1 or Q8_0 blocks, None if the tensor is stored otherwise."""
        return self.tensors.quantized(name)

    def load_tokenizer(self) -> Tokenizer:
        """A fresh `tokenizers.Tokenizer`."""
        return self.vocabulary.load_tokenizer()

    @property
    def chat_template(self) -> str | None:
        """Jinja source, None if the model has none."""
        return self.chat_templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """All templates by name ("default", "tool_use", ...)."""
        if self.chat_template_override is not None:
            return {"default": self.chat_template_override}
        return self.vocabulary.chat_templates

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Variables for the template: "bos_token", "eos_token", ... as far as they exist."""
        return self.vocabulary.special_tokens

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, ascending."""
        return self.vocabulary.eos_ids

    @property
    def add_bos(self) -> bool:
        """Whether `load_tokenizer().encode(text)` begins with `bos_id`."""
        return self.vocabulary.add_bos


def open_checkpoint(model: str | None, *, tokenizer: str | None = None, chat_template: str | None = None) -> Checkpoint:
    """Opens a Hugging Face directory, a GGUF file (or a directory with just one), or, for None, the embedded model.

    `tokenizer`: a directory (or its tokenizer.json, or a GGUF) to take all text-shaped things from instead.
    `chat_template`: a file, or the Jinja source itself. Raises CheckpointError, one line with path and reason.
    """
    checkpoint = _open(embedded_model_path() if model is None else Path(model).expanduser())
    if tokenizer is not None:
        checkpoint = replace(checkpoint, vocabulary=_open_vocabulary(Path(tokenizer).expanduser()))
    if chat_template is not None:
        checkpoint = replace(checkpoint, chat_template_override=_read_template(chat_template))
    return checkpoint


def model_name_of(model: str | None) -> str:
    """The name that open_checkpoint(model) will give, without reading it; of a path that is none, the last part."""
    try:
        path = embedded_model_path() if model is None else Path(model).expanduser()
        gguf = _gguf_at(path)
    except CheckpointError:
        return Path(model or "model").name
    return path.resolve().name if gguf is None else gguf.stem


def _open(path: Path) -> Checkpoint:
    gguf = _gguf_at(path)
    return _open_directory(path) if gguf is None else _open_gguf(gguf)


def _gguf_at(path: Path) -> Path | None:
    """The GGUF file meant by `path`, or None for a Hugging Face directory. Raises CheckpointError."""
    try:
        if path.is_file():
            return path
        if not path.is_dir():
            state = "is neither a file nor a directory" if path.exists() else "does not exist"
            raise CheckpointError(
                path,
                f"{state}; a model is a local Hugging Face directory or a .gguf file (nothing is downloaded)",
            )
        entries = sorted(path.iterdir())
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"can't be read: {getattr(error, 'strerror', None) or error}") from None
    ggufs = [entry for entry in entries if entry.suffix == ".gguf"]
    if path / "config.json" in entries or not ggufs:
        return None
    if len(ggufs) > 1:
        raise CheckpointError(path, f"holds {len(ggufs)} GGUF files; name one, such as {ggufs[0]}")
    return ggufs[0]


def _open_directory(directory: Path) -> Checkpoint:
    raw = read_model_config(directory)
    tensors = SafetensorsShards(directory)
    return Checkpoint(
        name=directory.resolve().name,
        path=directory,
        format="hf",
        config=parse_config(raw, directory / "config.json", has_head="lm_head.weight" in tensors.names),
        generation_defaults=read_generation_defaults(directory),
        tensors=tensors,
        vocabulary=HfVocabulary(directory, raw),
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    config = parse_metadata(file)
    return Checkpoint(
        name=path.stem,
        path=path,
        format="gguf",
        config=config,
        generation_defaults={},
        tensors=GgufTensors(file, config),
        vocabulary=GgufVocabulary(file),
    )


def _open_vocabulary(path: Path) -> Vocabulary:
    if path.name == "tokenizer.json":
        path = path.parent
    gguf = _gguf_at(path)
    if gguf is not None:
        return GgufVocabulary(GgufFile(gguf))
    return HfVocabulary(path, read_optional_object(path / "config.json"))


def _read_template(chat_template: str) -> str:
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise CheckpointError(path, "is no chat template: neither a file nor Jinja source")
    return read_text(path)
