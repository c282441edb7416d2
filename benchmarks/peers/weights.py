"""The weights that all servers get: one GGUF, and what it holds in bfloat16 in each program's own form."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.make_tiny_model import make_tiny_model
from benchmarks.peers.places import LLAMA_CPP_TOOLS, WEIGHTS, PeerError
from tokring.checkpoint import open_checkpoint
from tokring.checkpoint.embedded_model import embedded_model_path
from tokring.checkpoint.export import export

TINY_VOCABULARY = 512


def stored() -> Path:
    """The embedded model's GGUF, mostly Q4_1. Raises CheckpointError if it isn't installed."""
    return embedded_model_path()


def bfloat16_directory() -> Path:
    """The same weights dequantized and rounded to bfloat16, as a Hugging Face directory."""
    return _made("embedded-bfloat16", lambda path: export(open_checkpoint(None), path, dtype="bfloat16"))


def bfloat16_gguf() -> Path:
    """The same, written as a GGUF by llama.cpp's own tool. Raises PeerError without llama.cpp."""
    return _made("embedded-bfloat16.gguf", _requantize)


def tiny_directory() -> Path:
    """One layer, hidden size 64, 512 tokens: what is left to measure is the server."""
    return _made("tiny-512", lambda path: make_tiny_model(path, vocab_size=TINY_VOCABULARY))


def _requantize(path: Path) -> None:
    program = LLAMA_CPP_TOOLS / "llama-quantize"
    if not program.exists():
        raise PeerError("llama.cpp is not installed: python -m benchmarks.peers.install llama.cpp")
    command = [str(program), "--allow-requantize", str(stored()), str(path), "BF16"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise PeerError(f"llama-quantize ended with {ended.returncode}: {ended.stdout[-200:].decode(errors='replace')}")


def _made(name: str, make: Callable[[Path], object]) -> Path:
    """The file or directory `name`, made once: under another name first, so that half of it is never taken for it."""
    path = WEIGHTS / name
    if not path.exists():
        WEIGHTS.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name("unfinished-" + name)
        make(unfinished)
        unfinished.rename(path)
    return path
