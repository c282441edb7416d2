"""build_runner: the backend that the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from tokring.checkpoint import Checkpoint
from tokring.config import Config
from tokring.engine.cpu_runner import CpuRunner
from tokring.engine.mock_runner import MockRunner
from tokring.engine.model_runner import AsynchronousRunner, ModelRunner
from tokring.engine.threaded_runner import ThreadedRunner


def build_runner(
    config: Config, checkpoint: Checkpoint, max_model_len: int, progress: Callable[[int, int], None]
) -> ModelRunner | AsynchronousRunner:
    """Build and load the runner; `progress(done_bytes, total_bytes)` is called while weights load."""
    if config.engine.engine == "mock":
        runner = MockRunner(
            checkpoint.config.vocab_size,
            max_rows=config.engine.max_num_seqs,
            step_ms=config.engine.mock_step_ms,
            prefill_tokens_per_s=config.engine.mock_prefill_tokens_per_s,
            banned_ids=checkpoint.eos_ids,
        )
        return ThreadedRunner(runner) if config.engine.mock_async else runner
    return CpuRunner(
        checkpoint,
        dtype=config.model.dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        progress=progress,
    )
