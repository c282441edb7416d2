"""ShadowedRunner: a CudaRunner whose every step is repeated by a CPU runner and by the host's sampler."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tokring.engine.cpu_runner import CpuRunner
from tokring.engine.cuda.runner import CudaRunner
from tokring.engine.model_runner import StepOutput
from tokring.engine.sampling import draw
from tokring.engine.step_batch import DrawColumns, StepBatch

MAX_ERROR = 0.06  # of a logit, in standard deviations of its row: bfloat16 against float32 activations


class ShadowedRunner:
    """An AsynchronousRunner. The KV cache of the CPU runner holds what its own model makes of the same tokens.

    Logits must be near those of the CPU, and drawn tokens those that the host draws from the device's very logits. So
    nothing depends on near ties, and an error of any step is found in that step.
    """

    is_asynchronous: Literal[True] = True
    is_invariant = False
    name = "shadowed"

    def __init__(self, runner: CudaRunner, shadow: CpuRunner, max_error: float = MAX_ERROR) -> None:
        self.runner = runner
        self.max_error = max_error
        self.vocab_size = runner.vocab_size
        self.num_steps = 0
        self.num_drawn = 0
        self._shadow = shadow
        self._drawn = np.zeros(0, np.int32)

    def kv_bytes_per_block(self) -> int:
        return self.runner.kv_bytes_per_block()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self.runner.allocate_kv_cache(num_blocks)
        self._shadow.allocate_kv_cache(num_blocks)
        self.runner.warm_up()

    def warm_up(self) -> None:
        pass

    def launch(self, batch: StepBatch, columns: DrawColumns | None, wanted_logits: NDArray[np.int32]) -> Any:
        everything = np.arange(len(batch.logits_index), dtype=np.int32)
        handle = self.runner.launch(batch, columns, everything)
        return handle, deepcopy(batch), deepcopy(columns), wanted_logits.copy()

    def collect(self, handle: Any) -> StepOutput:
        launched, batch, columns, wanted_logits = handle
        logits, token_ids, finite = self.runner.collect(launched)
        logits, token_ids = logits.copy(), token_ids.copy()
        self._compare(logits, self._shadow.execute(self._with_known_tokens(batch)))
        if columns is not None:
            expected, is_finite = np.zeros(len(token_ids), np.int32), np.zeros(len(token_ids), np.bool_)
            draw(logits[: len(token_ids)].copy(), columns, expected, is_finite)
            assert token_ids.tolist() == expected.tolist() and finite.tolist() == is_finite.tolist()
            self.num_drawn += len(token_ids)
        self._drawn = token_ids
        self.num_steps += 1
        return StepOutput(logits[wanted_logits], token_ids, finite)

    def _with_known_tokens(self, batch: StepBatch) -> StepBatch:
        unknown = batch.token_ids < 0
        batch.token_ids[unknown] = self._drawn[-1 - batch.token_ids[unknown]]
        return batch

    def _compare(self, logits: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        assert logits.shape == expected.shape
        if len(logits):
            error = np.abs(logits - expected).max(axis=1) / expected.std(axis=1)
            assert error.max() < self.max_error, f"step {self.num_steps}: errors {error.round(3).tolist()}"
