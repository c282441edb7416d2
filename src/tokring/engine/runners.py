"""build_runner: the backend that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokring.checkpoint import Checkpoint
from tokring.config import Config

if TYPE_CHECKING:
    from tokring.engine.torch_runner import TorchRunner


def build_torch_runner(
    config: Config, checkpoint: Checkpoint, *, max_model_len: int, progress: Callable[[int, int], None]
) -> TorchRunner:
    """Loads the weights, which takes seconds to minutes.

    `progress(done_bytes, total_bytes)` is called after each tensor. Raises CheckpointError or ModelError.
    The KV cache is still to be allocated; warm_up() afterwards compiles oneDNN's kernels for common batch sizes.
    """
    from tokring.engine.torch_runner import TorchRunner  # imports torch: seconds, and only where it is needed

    return TorchRunner(
        checkpoint,
        dtype=config.model.dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        progress=progress,
    )
