"""ShadowedRunner: a CudaRunner whose every step is repeated by a CPU runner and by the host's sampler."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.cpu_runner import CpuRunner
from tokring.engine.cuda.runner import CudaRunner
from tokring.engine.logit_rules import apply_rules
from tokring.engine.model_runner import StepOutput
from tokring.engine.sampling import draw
from tokring.engine.special_draw import SpecialDraw
from tokring.engine.step_batch import DrawColumns, StepBatch
from tokring_kernels import reference

MAX_ERROR = 0.06  # of a logit, in standard deviations of its row: bfloat16 against float32 activations


class ShadowedRunner:
    """An AsynchronousRunner. The KV cache of the CPU runner holds what its own model makes of the same tokens.

    Logits must be near those of the CPU, and drawn tokens those that the host draws from the device's very logits. So
    nothing depends on near ties, and an error of any step is found in that step.
    """

    is_asynchronous: Literal[True] = True
    draws_by_rules = True
    is_invariant = False
    name = "shadowed"

    def __init__(self, runner: CudaRunner, shadow: CpuRunner, max_error: float = MAX_ERROR) -> None:
        self.runner = runner
        self.max_error = max_error
        self.vocab_size = runner.vocab_size
        self.num_steps = 0
        self.num_drawn = 0
        self.num_ruled = self.num_ruled_ahead = self.num_masked = self.num_logprobs = 0  # samples, entries
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

    def launch(
        self,
        batch: StepBatch,
        columns: DrawColumns | None,
        wanted_logits: NDArray[np.int32],
        special: SpecialDraw | None = None,
    ) -> Any:
        everything = np.arange(len(batch.logits_index), dtype=np.int32)
        noted = None
        if special is not None:
            masks = None if special.masks is None else special.masks()
            special.masks = None if masks is None else lambda: masks
            ruled = []
            if special.ruled is not None:
                for i, (index, request) in enumerate(zip(special.ruled.samples, special.ruled.requests, strict=True)):
                    ruled.append((int(index), request, request.rules, special.ruled.tokens_of(i).copy()))
            noted = (ruled, special.masked, None if masks is None else masks.copy(), special.logprobs)
        handle = self.runner.launch(batch, columns, everything, special)
        return handle, deepcopy(batch), deepcopy(columns), wanted_logits.copy(), noted

    def collect(self, handle: Any) -> StepOutput:
        launched, batch, columns, wanted_logits, noted = handle
        output = self.runner.collect(launched)
        logits, token_ids, finite = output.logits.copy(), output.token_ids.copy(), output.finite
        self._compare(logits, self._shadow.execute(self._with_known_tokens(batch)))
        if columns is not None:
            changed = logits[: len(token_ids)].copy()
            if noted is not None:
                self._apply_rules(changed, *noted[:3])
            expected, is_finite = np.zeros(len(token_ids), np.int32), np.zeros(len(token_ids), np.bool_)
            draw(changed, columns, expected, is_finite)
            assert token_ids.tolist() == expected.tolist() and finite.tolist() == is_finite.tolist()
            self.num_drawn += len(token_ids)
            if noted is not None and noted[3] is not None:
                self._check_logprobs(logits, token_ids, noted[3], output.logprobs)
        self._drawn = token_ids.copy()
        self.num_steps += 1
        return output._replace(logits=logits[wanted_logits], token_ids=token_ids)

    def _apply_rules(self, logits: NDArray[np.float32], ruled: Any, masked: Any, masks: Any) -> None:
        """As the host's sampler does."""
        self.num_ruled += len(ruled)
        for index, request, rules, token_ids in ruled:
            if token_ids[-1] < 0:
                self.num_ruled_ahead += 1
                token_ids[-1] = self._drawn[-1 - token_ids[-1]]
            apply_rules(logits[index], rules, token_ids)
            prompt, output = np.split(token_ids, [request.num_prompt])
            logits[index] = reference.apply_penalties(
                logits[index], prompt, output, rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty
            )
        if masks is not None:
            self.num_masked += len(masked)
            tokring_kernels.apply_bitmask(logits, masks, masked)

    def _check_logprobs(self, logits: NDArray[np.float32], drawn: Any, wanted: Any, found: Any) -> None:
        of_samples = wanted.token_ids < 0  # none in a step of prompt chunks that don't end
        chosen = wanted.token_ids.copy()
        chosen[of_samples] = drawn[wanted.rows[of_samples]]
        self.num_logprobs += len(chosen)
        for entry, (row, token_id) in enumerate(zip(wanted.rows, chosen, strict=True)):
            logprob, rank, ids, top = reference.logprobs(logits[row], int(token_id), wanted.width)
            assert found.rank[entry] == rank and found.top_id[entry].tolist() == ids.tolist()
            np.testing.assert_allclose(found.logprob[entry], logprob, atol=2e-5)
            np.testing.assert_allclose(found.top_logprob[entry], top, atol=2e-5)

    def _with_known_tokens(self, batch: StepBatch) -> StepBatch:
        unknown = batch.token_ids < 0
        batch.token_ids[unknown] = self._drawn[-1 - batch.token_ids[unknown]]
        return batch

    def _compare(self, logits: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        assert logits.shape == expected.shape
        if len(logits):
            error = np.abs(logits - expected).max(axis=1) / expected.std(axis=1)
            assert error.max() < self.max_error, f"step {self.num_steps}: errors {error.round(3).tolist()}"
