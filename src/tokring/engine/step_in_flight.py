"""StepInFlight: a step between its launch and the publishing of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokring.engine.request import Request
from tokring.engine.special_draw import SpecialDraw
from tokring.engine.step_batch import StepBatch

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class StepInFlight:
    """What the engine keeps of a launched step. Rows leave and move while it is in flight."""

    batch: StepBatch  # its arrays are valid only until the next step is scheduled
    rows: Int32  # [m] the rows that sample, where they are now; -1: the request has left, its token is surplus
    result: Any  # the logits, or what the runner gave for the step
    runs_ahead: bool = False  # the next step may be launched before this one is sampled
    is_drawn: bool = False  # the runner draws its tokens
    wanted_logits: Int32 | None = None  # see AsynchronousRunner.launch
    special: SpecialDraw | None = None  # the same
    lengths: Int64 | None = None  # [m] of the rows before their tokens, once these are counted in num_tokens
    prefilled: Sequence[tuple[Request, int]] = ()  # with a prompt chunk: computed positions

    def forget(self, row: int, last: int) -> None:
        """A row has left, and the last one has moved into its place (row == last: none has)."""
        self.rows[self.rows == row] = -1
        if last != row:
            self.rows[self.rows == last] = row
