"""RulesRunner: ToyRunner behind a thread that draws by rules, grammars and logprobs, as the CUDA runner does."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tests.support.toy_runner import ToyRunner
from tokring.engine.logit_rules import apply_rules
from tokring.engine.model_runner import StepOutput
from tokring.engine.request import LogitRules
from tokring.engine.sampling import draw
from tokring.engine.special_draw import FoundLogprobs, LogprobsWanted, SpecialDraw
from tokring.engine.step_batch import DrawColumns, StepBatch
from tokring_kernels import reference

Ruled = list[tuple[int, int, LogitRules, NDArray[np.int32]]]  # sample, tokens of its prompt, rules, tokens so far


class RulesRunner:
    """An AsynchronousRunner that takes a SpecialDraw."""

    name = "toy that draws by rules"
    is_invariant = True
    is_asynchronous: Literal[True] = True
    draws_by_rules = True

    def __init__(self, inner: ToyRunner) -> None:
        self.inner = inner
        self.vocab_size = inner.vocab_size
        self.num_ahead = 0  # steps with rules, a grammar or logprobs that were launched while another was in flight
        self._num_in_flight = 0
        self._thread = ThreadPoolExecutor(1, "runner")
        self._drawn = np.zeros(0, np.int32)  # of the last step; the thread's

    def kv_bytes_per_block(self) -> int:
        return self.inner.kv_bytes_per_block()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self.inner.allocate_kv_cache(num_blocks)

    def warm_up(self) -> None:
        pass

    def launch(
        self,
        batch: StepBatch,
        columns: DrawColumns | None,
        wanted_logits: NDArray[np.int32],
        special: SpecialDraw | None = None,
    ) -> Future[StepOutput]:
        assert self._num_in_flight <= 1
        self.num_ahead += self._num_in_flight > 0 and special is not None
        self._num_in_flight += 1
        ruled: Ruled = []
        masked, masks, wanted = np.zeros(0, np.int32), None, None
        if special is not None:
            assert columns is not None
            masked, wanted = special.masked.copy(), deepcopy(special.logprobs)
            if special.ruled is not None:
                for i, (sample, request) in enumerate(zip(special.ruled.samples, special.ruled.requests, strict=True)):
                    tokens = special.ruled.tokens_of(i).copy()
                    assert request.rules is not None and len(tokens) == special.ruled.num_tokens[i]
                    ruled.append((int(sample), request.num_prompt, request.rules, tokens))
            if special.masks is not None:
                masks = special.masks().copy()
        arguments = deepcopy((batch, columns, wanted_logits))
        return self._thread.submit(self._execute, *arguments, ruled, masked, masks, wanted)

    def collect(self, handle: Future[StepOutput]) -> StepOutput:
        self._num_in_flight -= 1
        return handle.result()

    def _execute(
        self,
        batch: StepBatch,
        columns: DrawColumns | None,
        wanted_logits: NDArray[np.int32],
        ruled: Ruled,
        masked: NDArray[np.int32],
        masks: NDArray[np.uint32] | None,
        wanted: LogprobsWanted | None,
    ) -> StepOutput:
        before = np.maximum(self._drawn, 0)  # where no token could be drawn any id will do
        unknown = batch.token_ids < 0
        batch.token_ids[unknown] = before[-1 - batch.token_ids[unknown]]
        logits = self.inner.execute(batch)
        if columns is None:
            return StepOutput(logits[wanted_logits], np.zeros(0, np.int32), np.zeros(0, np.bool_))
        num_samples = len(columns.position)
        changed = logits[:num_samples].copy()
        for sample, num_prompt, rules, tokens in ruled:
            if tokens[-1] < 0:
                tokens[-1] = before[-1 - tokens[-1]]
            assert (tokens >= 0).all()
            apply_rules(changed[sample], rules, tokens)
            changed[sample] = reference.apply_penalties(
                changed[sample], tokens[:num_prompt], tokens[num_prompt:],
                rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty,
            )  # fmt: skip
        if masks is not None:
            tokring_kernels.apply_bitmask(changed, masks, masked)
        self._drawn, finite = np.zeros(num_samples, np.int32), np.zeros(num_samples, np.bool_)
        draw(changed, columns, self._drawn, finite)
        found = None if wanted is None else _logprobs(logits, wanted, self._drawn)
        nothing_left = np.isneginf(changed).all(axis=1)
        return StepOutput(logits[wanted_logits], self._drawn.copy(), finite, nothing_left, found)


def _logprobs(logits: NDArray[np.float32], wanted: LogprobsWanted, drawn: NDArray[np.int32]) -> FoundLogprobs:
    of_samples = wanted.token_ids < 0
    chosen = wanted.token_ids.copy()
    chosen[of_samples] = drawn[wanted.rows[of_samples]]
    found: Any = tokring_kernels.logprobs(logits[wanted.rows], np.maximum(chosen, 0), wanted.width)
    return FoundLogprobs(found.chosen, found.rank, found.top_ids, found.top)
