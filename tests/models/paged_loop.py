"""Test support: drives a ModelRunner request by request, without the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokring.engine.model_runner import ModelRunner
from tokring.engine.step_batch import StepBatch

BLOCK_SIZE = 16


class PagedLoop:
    """Sequences in one KV cache. Each gets its blocks in a scattered order when it is added."""

    def __init__(self, runner: ModelRunner, *, num_sequences: int, max_length: int) -> None:
        self._runner = runner
        self._blocks_per_sequence = -(-max_length // BLOCK_SIZE)
        num_blocks = num_sequences * self._blocks_per_sequence + 1
        runner.allocate_kv_cache(num_blocks)
        self._free = list(np.random.default_rng(0).permutation(np.arange(1, num_blocks)))
        self._tables: list[NDArray[np.int32]] = []
        self.lengths: list[int] = []

    def add(self) -> int:
        """A new empty sequence's number."""
        blocks = [self._free.pop() for _ in range(self._blocks_per_sequence)]
        self._tables.append(np.array(blocks, np.int32))
        self.lengths.append(0)
        return len(self.lengths) - 1

    def step(self, tokens: dict[int, Sequence[int]]) -> dict[int, NDArray[np.float32]]:
        """Appends tokens to sequences in one batch; logits [len(tokens), vocab] of each sequence's new tokens."""
        sequences = list(tokens)
        scheduled = np.array([len(tokens[s]) for s in sequences], np.int32)
        computed = np.array([self.lengths[s] for s in sequences], np.int32)
        starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
        positions = np.concatenate([np.arange(c, c + n) for c, n in zip(computed, scheduled, strict=True)])
        blocks = np.concatenate(
            [
                self._tables[s][np.arange(c, c + n) // BLOCK_SIZE]
                for s, c, n in zip(sequences, computed, scheduled, strict=True)
            ]
        )
        batch = StepBatch(
            rows=np.array(sequences, np.int32),
            num_scheduled=scheduled,
            num_computed=computed,
            query_start=starts,
            token_ids=np.concatenate([np.asarray(tokens[s], np.int32) for s in sequences]),
            positions=positions.astype(np.int32),
            slot_mapping=blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
            seq_lens=(computed + scheduled).astype(np.int32),
            block_table=np.stack([self._tables[s] for s in sequences]),
            sample_index=np.arange(len(sequences), dtype=np.int32),
            logits_index=np.arange(starts[-1], dtype=np.int32),
        )
        logits = self._runner.execute(batch)
        for sequence, count in zip(sequences, scheduled, strict=True):
            self.lengths[sequence] += int(count)
        return {s: logits[starts[i] : starts[i + 1]].copy() for i, s in enumerate(sequences)}

    def rewind(self, sequence: int, count: int) -> None:
        """Forgets a sequence's last tokens; their cache slots are written again by the next ones."""
        self.lengths[sequence] -= count

    def prefill(self, prompt: Sequence[int], chunk: int | None = None) -> tuple[int, NDArray[np.float32]]:
        """A new sequence with this prompt, `chunk` tokens a step; its number and logits [len(prompt), vocab]."""
        sequence, chunk = self.add(), chunk or len(prompt)
        parts = [self.step({sequence: prompt[i : i + chunk]})[sequence] for i in range(0, len(prompt), chunk)]
        return sequence, np.concatenate(parts)

    def greedy(self, prompt: Sequence[int], num_tokens: int, chunk: int | None = None) -> list[int]:
        """The `num_tokens` most probable next ids, one after the other."""
        sequence, logits = self.prefill(prompt, chunk)
        output = [int(logits[-1].argmax())]
        while len(output) < num_tokens:
            output.append(int(self.step({sequence: output[-1:]})[sequence][-1].argmax()))
        return output
