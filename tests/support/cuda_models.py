"""Checks of the CUDA runner that hold on every device: the emulation in `make test`, a GPU in `make test-gpu`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tests.models.paged_loop import PagedLoop
from tests.models.tiny_checkpoints import WIDE, save_tiny_checkpoint
from tokring.checkpoint import open_checkpoint
from tokring.engine.cuda.backend import Device
from tokring.engine.cuda.runner import CudaRunner
from tokring.engine.step_batch import StepBatch

MAX_MODEL_LEN = 128
PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 131, size=45)]


class EveryStepCollected:
    """A CudaRunner as a synchronous ModelRunner."""

    is_asynchronous: Literal[False] = False

    def __init__(self, runner: CudaRunner) -> None:
        self.runner = runner
        self.name, self.is_invariant, self.vocab_size = runner.name, runner.is_invariant, runner.vocab_size

    def kv_bytes_per_block(self) -> int:
        return self.runner.kv_bytes_per_block()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self.runner.allocate_kv_cache(num_blocks)
        self.runner.warm_up()

    def warm_up(self) -> None:
        pass

    def execute(self, batch: StepBatch) -> NDArray[np.float32]:
        wanted = np.arange(len(batch.logits_index), dtype=np.int32)
        return self.runner.collect(self.runner.launch(batch, None, wanted)).logits


def check_architecture(name: str, directory: Path, device: Device, max_error: float = 0.05) -> None:
    """Logits of a prompt in chunks, then token by token: as near to transformers' float32 as its own bfloat16, or so.

    Raises AssertionError.
    """
    model = save_tiny_checkpoint(name, directory, **WIDE[name])
    runner = CudaRunner(
        open_checkpoint(str(directory)), device, max_model_len=MAX_MODEL_LEN, max_num_seqs=2, max_num_batched_tokens=32
    )
    loop = PagedLoop(EveryStepCollected(runner), num_sequences=1, max_length=MAX_MODEL_LEN)
    sequence, logits = loop.prefill(PROMPT[:40], chunk=23)
    steps = [loop.step({sequence: [token]})[sequence] for token in PROMPT[40:]]
    expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    theirs = copy.deepcopy(model).bfloat16()(torch.tensor([PROMPT])).logits[0].float().numpy()
    error = relative_error(np.concatenate([logits, *steps]), expected)
    assert error < max(max_error, 1.5 * relative_error(theirs, expected)), f"{name}: relative error {error:.4f}"


def relative_error(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Root mean square of the difference, in standard deviations of what is expected."""
    return float(np.sqrt(np.mean((logits - expected) ** 2)) / expected.std())
