"""What EngineCore asks of a backend: a ModelRunner executes a step, an AsynchronousRunner launches it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tokring.engine.special_draw import FoundLogprobs, SpecialDraw
from tokring.engine.step_batch import DrawColumns, StepBatch

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


class Backend(Protocol):
    """A model with a paged KV cache. It keeps no state per request: rows move between steps."""

    name: str
    is_invariant: bool  # same bits for a row whatever else is in the batch (DESIGN §5, promise B)
    vocab_size: int

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers, keys and values."""
        ...

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserve the KV cache; called once, before the first step."""
        ...

    def warm_up(self) -> None:
        """Pay one-time costs (kernel compilation) before the first request; called after allocate_kv_cache."""
        ...


class ModelRunner(Backend, Protocol):
    """Executes a step on the step thread."""

    is_asynchronous: Literal[False]

    def execute(self, batch: StepBatch) -> Float32:
        """Write the KV of every token of `batch`, return logits float32[len(batch.logits_index), vocab_size].

        The result is the runner's writable scratch, valid until the next call.
        """
        ...


class StepOutput(NamedTuple):
    """What an asynchronous runner brings back of a step; valid until the step after the next is launched."""

    logits: Float32  # [len(wanted_logits), vocab_size], writable: the rows that were asked for
    token_ids: Int32  # [m] what it drew; empty if it was to draw nothing
    finite: NDArray[np.bool_]  # [m] False, with token -1, where no token could be drawn; empty likewise
    nothing_left: NDArray[np.bool_] | None = None  # [m] of those where rules or a grammar forbid every token
    logprobs: FoundLogprobs | None = None  # if they were wanted


class AsynchronousRunner(Backend, Protocol):
    """Executes steps in the order of their launch, while the step thread prepares the next one.

    A step may be launched while the one before it executes: its batch then has ids -1 - i for tokens that are not
    known yet, each the token that the runner draws for sample i of the step launched just before. So the runner draws
    itself (see tokring_kernels.sample for the rules and the random numbers) and keeps the last step's tokens at hand.
    Where it could draw none (-1), any id will do: that request ends, and what comes of it is thrown away.
    """

    is_asynchronous: Literal[True]
    draws_by_rules: bool  # takes a SpecialDraw; else steps with rules, grammars or prompt logprobs are sampled here

    def launch(
        self, batch: StepBatch, draw: DrawColumns | None, wanted_logits: Int32, special: SpecialDraw | None = None
    ) -> Any:
        """Start a step; returns what collect() takes. Raises what the step thread must not survive.

        `draw`: parameters of the m samples; None: the engine samples, and nothing else is in flight meanwhile.
        wanted_logits int32[k]: indices in batch.logits_index whose logits, before any rule, the step thread wants.
        special: what else the samples ask for; with draws_by_rules only, and with `draw` only.
        Everything that is needed of the arguments is copied before it returns.
        """
        ...

    def collect(self, handle: Any) -> StepOutput:
        """Wait for a step; called once for each, in the order of their launch. At most two are in flight."""
        ...
