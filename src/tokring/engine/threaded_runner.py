"""ThreadedRunner: makes a synchronous runner asynchronous, by a thread that executes what is launched."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokring.engine.model_runner import ModelRunner, StepOutput
from tokring.engine.sampling import draw
from tokring.engine.special_draw import SpecialDraw
from tokring.engine.step_batch import DrawColumns, StepBatch


class ThreadedRunner:
    """An AsynchronousRunner: what a device's stream is, for a backend that has none. Its tokens are the inner one's."""

    is_asynchronous: Literal[True] = True
    draws_by_rules = False

    def __init__(self, inner: ModelRunner) -> None:
        self.name = f"{inner.name}, asynchronous"
        self.is_invariant = inner.is_invariant
        self.vocab_size = inner.vocab_size
        self._inner = inner
        self._thread = ThreadPoolExecutor(1, "runner")
        self._drawn = np.zeros(0, np.int32)  # of the last step; the thread's

    def kv_bytes_per_block(self) -> int:
        """Return the inner runner's."""
        return self._inner.kv_bytes_per_block()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserve the inner runner's."""
        self._inner.allocate_kv_cache(num_blocks)

    def warm_up(self) -> None:
        """Warm the inner runner up."""
        self._inner.warm_up()

    def launch(
        self,
        batch: StepBatch,
        columns: DrawColumns | None,
        wanted_logits: NDArray[np.int32],
        special: SpecialDraw | None = None,
    ) -> Future[StepOutput]:
        """Have the step executed behind those launched before."""
        assert special is None
        return self._thread.submit(self._execute, *deepcopy((batch, columns, wanted_logits)))

    def collect(self, handle: Future[StepOutput]) -> StepOutput:
        """Wait for the step; raises what it has raised."""
        return handle.result()

    def _execute(self, batch: StepBatch, columns: DrawColumns | None, wanted_logits: NDArray[np.int32]) -> StepOutput:
        unknown = batch.token_ids < 0
        batch.token_ids[unknown] = self._drawn[-1 - batch.token_ids[unknown]]
        np.maximum(batch.token_ids, 0, out=batch.token_ids)  # where no token could be drawn
        logits = self._inner.execute(batch)
        wanted = logits[wanted_logits]
        if columns is None:
            return StepOutput(wanted, np.zeros(0, np.int32), np.zeros(0, np.bool_))
        num_samples = len(columns.position)
        self._drawn, finite = np.zeros(num_samples, np.int32), np.zeros(num_samples, np.bool_)
        draw(logits[:num_samples], columns, self._drawn, finite)
        return StepOutput(wanted, self._drawn, finite)
