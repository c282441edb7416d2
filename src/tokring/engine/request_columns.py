"""RequestColumns: the state of running requests that every step touches, as numpy columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.request import Request, record_offsets
from tokring.step_rows import COLUMNS
from tokring_ipc import NUM_INLINE_STOP_IDS

_INT64 = ("order", "seed", "token_base", "first_token_ns")
_INT32 = (  # in the order of _fill()
    "channel", "stream_slot", "slot_generation", "num_scheduled", "num_cached",  # these as step_rows.COLUMNS has them
    "num_prompt", "num_tokens", "num_computed", "max_total", "choice", "top_k", "last_token", "num_logprobs",
    "is_special", "num_drafted", "num_accepted",
)  # fmt: skip
_UNSIGNED = ("stream_slot", "slot_generation", "choice")
_FLOAT32 = ("temperature", "top_p", "min_p")


class RequestColumns:
    """Running requests fill rows [0, num_rows) without gaps, so a step works on views and gathers nothing.

    A row that leaves is replaced by the last one. To make that three copies instead of thirty, columns of one dtype are
    rows of one matrix. Token ids don't move: `token_base` says where a row's ids start in the flat `token_ids`.
    """

    # whole process
    order: NDArray[np.int64]
    seed: NDArray[np.int64]
    token_base: NDArray[np.int64]
    first_token_ns: NDArray[np.int64]  # 0 before the first token
    channel: NDArray[np.int32]
    stream_slot: NDArray[np.uint32]
    slot_generation: NDArray[np.uint32]
    num_prompt: NDArray[np.int32]
    num_tokens: NDArray[np.int32]  # prompt and output so far, those included that a step in flight samples
    num_computed: NDArray[np.int32]  # positions whose KV exists, or will after the steps in flight
    num_scheduled: NDArray[np.int32]  # tokens of the current step, 0 if the row sits it out
    max_total: NDArray[np.int32]
    choice: NDArray[np.uint32]
    top_k: NDArray[np.int32]
    last_token: NDArray[np.int32]  # that is known
    num_logprobs: NDArray[np.int32]
    is_special: NDArray[np.int32]  # Request.is_special
    num_drafted: NDArray[np.int32]  # speculation: tokens drafted so far
    num_accepted: NDArray[np.int32]  # of those, accepted
    num_cached: NDArray[np.int32]  # Request.num_cached
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    stop_ids: NDArray[np.int32]  # [8, rows], padded with -2, which is never sampled
    step_words: NDArray[np.int32]  # [5, rows] the columns of step_rows.COLUMNS

    def __init__(self, max_rows: int, max_model_len: int) -> None:
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.num_rows = 0
        self.arange = np.arange(max_rows + 1, dtype=np.int32)  # row numbers, to be sliced
        self._int64 = np.zeros((len(_INT64), max_rows), np.int64)
        self._int32 = np.zeros((len(_INT32) + NUM_INLINE_STOP_IDS, max_rows), np.int32)
        self._float32 = np.zeros((len(_FLOAT32), max_rows), np.float32)
        self._store = tokring_kernels.RowStore([self._int64, self._int32, self._float32], _column_offsets())
        for names, matrix in ((_INT64, self._int64), (_INT32, self._int32), (_FLOAT32, self._float32)):
            for index, name in enumerate(names):
                setattr(self, name, matrix[index])
        for name in _UNSIGNED:
            setattr(self, name, getattr(self, name).view(np.uint32))
        self.stop_ids = self._int32[len(_INT32) :]
        self.step_words = self._int32[: len(COLUMNS)]
        # Lazily committed by the kernel: only what sequences really reach costs memory.
        # One more than the model's length: a sequence that ends may be followed by the mark for "no token".
        stride = max_model_len + 1
        self.token_ids = np.zeros(max_rows * stride, np.int32)
        self._free_bases = [row * stride for row in range(max_rows - 1, -1, -1)]
        self.requests: list[Request] = []
        self.version = 0  # changes with every request that joins or leaves

        # counts of rows that need more than the plain path; a step with zero of them skips the work
        self.num_special = 0
        self.num_needing_tokens = 0  # Request.needs_tokens
        self.num_with_logprobs = 0
        self.num_stop_columns = 0  # how many of the 8 stop id columns are in use at most (grows only)

    def add(self, request: Request, num_computed: int) -> int:
        """Give `request` the next row; returns it. The caller knows that there is one."""
        row = self.num_rows
        self.num_rows += 1
        self.version += 1
        self.requests.append(request)
        request.row = row
        self._fill(row, request, num_computed)
        if request.is_special:
            self.num_special += 1
            self.num_needing_tokens += request.needs_tokens
        self.num_with_logprobs += request.num_logprobs >= 0
        return row

    def remove(self, row: int) -> int:
        """Free a row after write_back(); the last row moves into it. Returns the one that was moved (== row: none)."""
        request = self.requests[row]
        self.version += 1
        request.row = -1
        self._free_bases.append(self.token_base.item(row))
        if request.is_special:
            self.num_special -= 1
            self.num_needing_tokens -= request.needs_tokens
        self.num_with_logprobs -= request.num_logprobs >= 0
        self.num_rows -= 1
        last = self.num_rows
        moved = self.requests.pop()
        if row != last:
            self._store.move(last, row)
            self.requests[row] = moved
            moved.row = row
        return last

    def write_back(self, row: int) -> None:
        """Tell the row's request what has changed while it ran."""
        request = self.requests[row]
        request.first_token_ns = self.first_token_ns.item(row)
        request.num_drafted, request.num_accepted = self.num_drafted.item(row), self.num_accepted.item(row)

    def tokens(self, row: int) -> NDArray[np.int32]:
        """Prompt and output so far of one row; a view."""
        base = self.token_base.item(row)
        return self.token_ids[base : base + self.num_tokens.item(row)]

    def select(self, rows: NDArray[np.int32]) -> slice | NDArray[np.intp]:
        """Return an index for distinct `rows`: a slice if they are all rows in order, so that nothing is gathered.

        Else intp, with which numpy gathers several times faster than with int32. All rows may be out of order: those of
        a step that was in flight while others left, and the last ones moved into their places.
        """
        num_rows = self.num_rows
        if len(rows) != num_rows or (rows.base is not self.arange and (rows != self.arange[:num_rows]).any()):
            return rows.astype(np.intp)
        return slice(0, num_rows)

    def prompt_logits(self, row: int, num_scheduled: int) -> tuple[int, int]:
        """Range within a row's scheduled tokens that predict prompt tokens whose logprobs are still to be sent."""
        request = self.requests[row]
        if request.num_prompt_logprobs < 0:
            return 0, 0
        computed = self.num_computed.item(row)
        first = max(0, request.num_prompt_logprobs_sent - computed)
        return first, max(first, min(num_scheduled, request.num_prompt - 1 - computed))

    def _fill(self, row: int, request: Request, num_computed: int) -> None:
        base, tokens = self._free_bases.pop(), request.token_ids
        self.token_ids[base : base + len(tokens)] = tokens
        num_stop = len(request.stop_ids)
        if num_stop > self.num_stop_columns:
            self.num_stop_columns = num_stop
        values = (
            request.order, base, request.first_token_ns,
            request.channel, 0, request.num_cached, request.num_prompt, len(tokens), num_computed, request.max_total,
            tokens.item(-1), request.num_logprobs, request.is_special, request.num_drafted, request.num_accepted,
        )  # fmt: skip
        self._store.put(row, request.record, values)


def _column_offsets() -> list[int]:
    """Where the columns that a request's record has are in it; -1 for the others."""
    first_stop_id = record_offsets("stop_ids")[0]
    stop_ids = [first_stop_id + 4 * index for index in range(NUM_INLINE_STOP_IDS)]
    # num_logprobs: of a Request it may be the number of its logprob_ids.
    own = {"choice": "choice_index", "num_logprobs": ""}
    of_int64, of_int32, of_float32 = (
        record_offsets(*(own.get(name, name) for name in names)) for names in (_INT64, _INT32, _FLOAT32)
    )
    return of_int64 + of_int32 + stop_ids + of_float32
