"""Executors: from a scheduled batch to its sampled tokens, on a backend of either kind."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tokring.engine.model_runner import AsynchronousRunner, ModelRunner
from tokring.engine.sampling import SampledTokens, Sampler
from tokring.engine.step_batch import StepBatch
from tokring.engine.step_in_flight import StepInFlight


class Executor(Protocol):
    """Steps are launched, then collected and sampled in the same order."""

    num_ahead: int  # steps that may be in flight when another one is launched

    def launch(self, batch: StepBatch) -> StepInFlight: ...
    def collect(self, step: StepInFlight) -> None: ...
    def sample(self, step: StepInFlight) -> SampledTokens: ...


class SynchronousExecutor:
    """The model runs in launch()."""

    num_ahead = 0

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def launch(self, batch: StepBatch) -> StepInFlight:
        """Compute the step's logits."""
        self._sampler.begin(batch)
        return StepInFlight(batch, self._sampler.rows_of(batch), self._runner.execute(batch))

    def collect(self, step: StepInFlight) -> None:
        """They are there."""

    def sample(self, step: StepInFlight) -> SampledTokens:
        """Draw the tokens."""
        return self._sampler.sample(step.batch, step.rows, step.result)


class AsynchronousExecutor:
    """The runner draws, and the next step is launched meanwhile, unless a request asks for more than it can do.

    A step with drafts is sampled here, and so is one with rules, a grammar or prompt logprobs if the runner does not
    draw by them. The step after it waits for that, as it does where tokens must be known (Request.needs_tokens).
    """

    def __init__(self, runner: AsynchronousRunner, sampler: Sampler, num_ahead: int) -> None:
        """`num_ahead`: 1, or 0 to wait for each step before the next one is scheduled."""
        self.num_ahead = num_ahead
        self._runner = runner
        self._sampler = sampler

    def launch(self, batch: StepBatch) -> StepInFlight:
        """Start the step."""
        self._sampler.begin(batch)
        rows = self._sampler.rows_of(batch)
        if self.num_ahead == 0 or not self._sampler.is_drawn(batch, by_rules=self._runner.draws_by_rules):
            everything = np.arange(len(batch.logits_index), dtype=np.int32)
            return StepInFlight(batch, rows, self._runner.launch(batch, None, everything), wanted_logits=everything)
        rows = rows.copy()
        if self._runner.draws_by_rules:
            wanted, special = _NONE, self._sampler.special_draw(batch, rows)
        else:
            wanted, special = self._sampler.with_logprobs(rows).astype(np.int32), None
        result = self._runner.launch(batch, self._sampler.draw_columns(rows), wanted, special)
        runs_ahead = self._sampler.runs_ahead
        return StepInFlight(batch, rows, result, runs_ahead, is_drawn=True, wanted_logits=wanted, special=special)

    def collect(self, step: StepInFlight) -> None:
        """Wait for the step."""
        step.result = self._runner.collect(step.result)

    def sample(self, step: StepInFlight) -> SampledTokens:
        """Draw the tokens, or take those that the runner drew."""
        if not step.is_drawn:
            return self._sampler.sample(step.batch, step.rows, step.result.logits)
        return self._sampler.drawn(step)


_NONE = np.zeros(0, np.int32)
