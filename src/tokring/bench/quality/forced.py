"""forced_logits: what a runner says about a text that is given, read as a prompt or as if it had generated it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tokring.engine.cpu_runner import BLOCK_SIZE, CpuRunner
from tokring.engine.step_batch import StepBatch

Logits = NDArray[np.float32]
# (windows, position, logits[windows given, vocabulary]): the runner's opinion about the token behind this position
Take = Callable[[NDArray[np.int64], int, Logits], None]


class Windows:
    """A text in equal windows, each of which begins without knowledge of the others; the second half of each counts.

    That is how llama.cpp's perplexity tool cuts its text: every counted position knows at least half a window.
    """

    def __init__(self, token_ids: list[int], length: int, bos_id: int | None) -> None:
        """Tokens past the last whole window are dropped. With `bos_id`, it takes the place of each first token."""
        count = len(token_ids) // length
        if not count or length < 4:
            raise ValueError(f"{len(token_ids)} tokens are no window of {length} (at least 4)")
        self.token_ids = np.array(token_ids[: count * length], np.int32).reshape(count, length)
        if bos_id is not None:
            self.token_ids[:, 0] = bos_id
        self.first = length // 2  # the first position whose successor is judged

    @property
    def count(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        return self.token_ids.shape[1]

    @property
    def positions(self) -> range:
        """Those whose successor is judged."""
        return range(self.first, self.length - 1)

    @property
    def targets(self) -> NDArray[np.int32]:
        """[count, len(positions)]: the token that follows in the text."""
        return self.token_ids[:, self.first + 1 :]


def forced_logits(runner: CpuRunner, windows: Windows, take: Take, *, generated: bool) -> None:
    """Calls `take` for every judged position. Prompt: a window a step. Generated: a token of all windows a step.

    The logits that `take` gets are valid during the call only.
    """
    blocks_each = -(-windows.length // BLOCK_SIZE)
    runner.allocate_kv_cache(windows.count * blocks_each)
    tables = np.arange(windows.count * blocks_each, dtype=np.int32).reshape(windows.count, blocks_each)
    known = windows.first if generated else windows.length
    for window in range(windows.count):
        wanted = [] if generated else list(windows.positions)
        one = slice(window, window + 1)
        logits = runner.execute(_batch(windows.token_ids[one, :known], 0, tables[one], wanted or [known - 1]))
        for row, position in enumerate(wanted):
            take(np.array([window]), position, logits[row : row + 1])
    if generated:
        everyone = np.arange(windows.count)
        for position in windows.positions:
            column = windows.token_ids[:, position : position + 1]
            logits = runner.execute(_batch(column, position, tables, list(range(windows.count))))
            take(everyone, position, logits)


def _batch(
    token_ids: NDArray[np.int32], num_computed: int, tables: NDArray[np.int32], logits_index: list[int]
) -> StepBatch:
    """One step of requests [n] that each add tokens [n, added] behind `num_computed` known ones."""
    num_requests, added = token_ids.shape
    positions = np.arange(num_computed, num_computed + added)
    slots = tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    rows = np.arange(num_requests, dtype=np.int32)
    return StepBatch(
        rows=rows,
        num_scheduled=np.full(num_requests, added, np.int32),
        num_computed=np.full(num_requests, num_computed, np.int32),
        query_start=np.arange(num_requests + 1, dtype=np.int32) * np.int32(added),
        token_ids=np.ascontiguousarray(token_ids.reshape(-1)),
        positions=np.tile(positions.astype(np.int32), num_requests),
        slot_mapping=slots.reshape(-1),
        seq_lens=np.full(num_requests, num_computed + added, np.int32),
        block_table=tables,
        sample_index=rows,
        logits_index=np.array(logits_index, np.int32),
    )
