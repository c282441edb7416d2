"""Damaged and hostile model files: opened, or refused as a CheckpointError; never anything else. `make fuzz-files`."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.fuzz.campaign import bend, main
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_hf import write_tiny_hf
from tokring.checkpoint import CheckpointError, open_checkpoint

GGUF_HEADER_BYTES = 16384  # most of what a parser looks at
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


@functools.cache
def _work() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="tokring-fuzz-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_tiny_gguf(directory / "good.gguf")
    write_tiny_hf(directory / "good")
    write_tiny_hf(directory / "sharded", num_shards=2)
    return directory


@functools.cache
def _good(name: str) -> bytes:
    return (_work() / name).read_bytes()


def case(rng: random.Random) -> str:
    """One damaged model: a GGUF, or a directory with one damaged file."""
    return rng.choice([_gguf, _safetensors, _shard_index, _json])(rng)


def _gguf(rng: random.Random) -> str:
    good = _good("good.gguf")
    path = _work() / "bad.gguf"
    header, rest = good[:GGUF_HEADER_BYTES], good[GGUF_HEADER_BYTES:]
    path.write_bytes(bend(header, rng) + (rest if rng.random() < 0.8 else b""))
    return "gguf " + read_all(path)


def _safetensors(rng: random.Random) -> str:
    good = _good("good/model.safetensors")
    end = 8 + int.from_bytes(good[:8], "little")
    header = bend(good[:end], rng)
    if rng.random() < 0.5:  # its length is right
        header = max(len(header) - 8, 0).to_bytes(8, "little") + header[8:]
    return "safetensors " + read_all(_directory("good", "model.safetensors", header + good[end:]))


def _shard_index(rng: random.Random) -> str:
    name = "model.safetensors.index.json"
    return "shards " + read_all(_directory("sharded", name, bend(_good(f"sharded/{name}"), rng)))


def _json(rng: random.Random) -> str:
    name = rng.choice(JSON_FILES)
    return f"{name} " + read_all(_directory("good", name, bend(_good(f"good/{name}"), rng)))


def _directory(good: str, name: str, data: bytes) -> Path:
    """A copy of a good model with one file of other content."""
    directory = _work() / "bad"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(_work() / good, directory)
    (directory / name).write_bytes(data)
    return directory


def read_all(path: Path) -> str:
    """Everything that a server reads of a model."""
    try:
        checkpoint = open_checkpoint(str(path))
        checkpoint.load_tokenizer().encode("The capital of France")
        for text in (*checkpoint.chat_templates.values(), *checkpoint.special_tokens.values()):
            assert isinstance(text, str)
        assert all(type(token_id) is int for token_id in checkpoint.eos_ids)
        for name in checkpoint.tensor_names():
            checkpoint.quantized(name)
            checkpoint.tensor(name)
    except CheckpointError as error:
        assert "\n" not in str(error), "an error meant for the user is one line"
        return "refused"
    return "read"


if __name__ == "__main__":
    sys.exit(main(case))
