"""judge_all: every way to run a model on the CPU, and llama.cpp, against the model's own float32 logits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokring.bench.quality.divergence import Divergence, log_softmax
from tokring.bench.quality.forced import Logits, Windows, forced_logits
from tokring.bench.quality.llama_cpp import LlamaCppError, judge, write_reference
from tokring.checkpoint import Checkpoint
from tokring.config import Config, ConfigError, EngineSettings, ModelSettings
from tokring.engine.cpu_runner import CpuRunner
from tokring.engine.runners import load_runner
from tokring.options import all_fields

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """One set of `tokring serve`'s options; "" as name is the default."""

    name: str
    model: tuple[tuple[str, Any], ...] = ()
    engine: tuple[tuple[str, Any], ...] = ()


REFERENCE = Variant("--dtype float32", (("dtype", "float32"),))
VARIANTS = (
    Variant("default"),
    Variant("--dtype bfloat16", (("dtype", "bfloat16"),)),
    Variant("--kv-cache-dtype int8", (), (("kv_cache_dtype", "int8"),)),
    Variant("--cpu-fast", (), (("cpu_fast", True),)),
)


def known_variants() -> list[Variant]:
    """Those whose options exist."""
    options = {item.name for item, _ in all_fields()}
    return [each for each in VARIANTS if {name for name, _ in each.model + each.engine} <= options]


class Judge:
    """Holds the reference's log-probabilities, [windows, positions, vocabulary] float32: 200 kB a position of 49k."""

    def __init__(self, model: str | None, checkpoint: Checkpoint, windows: Windows) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._windows = windows
        shape = (windows.count, len(windows.positions), checkpoint.config.vocab_size)
        self.reference: NDArray[np.float32] = np.empty(shape, np.float32)
        self._references_own = Divergence()
        self._collect(REFERENCE)

    def _collect(self, variant: Variant) -> None:
        def keep(members: NDArray[np.int64], position: int, logits: Logits) -> None:
            at = position - self._windows.first
            self.reference[members, at] = log_softmax(logits[:, : self.reference.shape[2]])
            self._references_own.add(self.reference[members, at], logits, self._windows.targets[members, at])

        forced_logits(self._runner(variant), self._windows, keep, generated=False)

    def rows(self, variant: Variant) -> list[Row]:
        """As a prompt and as if generated. Raises ConfigError where the backend lacks an option."""
        return [self._row(variant, generated) for generated in (False, True)]

    def reference_row(self) -> Row:
        return {"who": REFERENCE.name, "as": "prompt", **asdict(self._references_own.figures())}

    def llama_cpp_row(self, program: Path, model: Path) -> Row:
        """Raises LlamaCppError."""
        with tempfile.NamedTemporaryFile(prefix="tokring-quality-") as file:
            write_reference(file, self._windows, self.reference)
            file.flush()
            figures = judge(program, model, Path(file.name), self._windows, len(os.sched_getaffinity(0)))
        return {"who": "llama.cpp", "as": "prompt", **asdict(figures)}

    def _row(self, variant: Variant, generated: bool) -> Row:
        divergence = Divergence()

        def compare(members: NDArray[np.int64], position: int, logits: Logits) -> None:
            at = position - self._windows.first
            known = self.reference[members, at]
            divergence.add(known, logits[:, : known.shape[1]], self._windows.targets[members, at])

        forced_logits(self._runner(variant), self._windows, compare, generated=generated)
        how = "generated" if generated else "prompt"
        return {"who": variant.name, "as": how, **asdict(divergence.figures())}

    def _runner(self, variant: Variant) -> CpuRunner:
        config = Config(
            model=replace(ModelSettings(model=self._model), **dict(variant.model)),
            engine=replace(EngineSettings(device="cpu"), **dict(variant.engine)),
        )
        max_model_len = self._windows.length
        loaded = load_runner(config, "cpu", self._checkpoint, max_model_len, lambda done, total: None)
        assert isinstance(loaded.runner, CpuRunner)
        return loaded.runner


def judge_all(
    model: str | None,
    checkpoint: Checkpoint,
    windows: Windows,
    variants: Sequence[Variant],
    llama_perplexity: Path | None,
    tell: Callable[[str], None],
) -> tuple[list[Row], dict[str, str]]:
    """(rows, what was left out and why)."""
    judge = Judge(model, checkpoint, windows)
    rows, skipped = [judge.reference_row()], {}
    for variant in variants:
        tell(variant.name)
        try:
            rows += judge.rows(variant)
        except ConfigError as error:
            skipped[variant.name] = str(error)
    path = checkpoint.path
    if llama_perplexity is None:
        skipped["llama.cpp"] = "llama-perplexity is not installed (python -m benchmarks.peers.install llama.cpp)"
    elif path.suffix != ".gguf":
        skipped["llama.cpp"] = f"{path} is no GGUF"
    else:
        tell("llama.cpp")
        try:
            rows.append(judge.llama_cpp_row(llama_perplexity, path))
        except LlamaCppError as error:
            skipped["llama.cpp"] = str(error)
    return rows, skipped
