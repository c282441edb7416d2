"""FrontEnd: the engine's side of one connected front end."""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import replace
from itertools import product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokring.engine.intake import RequestFrame
from tokring.engine.request import Request
from tokring.engine.request_columns import RequestColumns
from tokring.engine.sampling import Logprobs, SampledTokens
from tokring_ipc import FINISH_DTYPE, ErrorCode, FinishReason

UInt32 = NDArray[np.uint32]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
_FRAME_OVERHEAD_BYTES = 256  # header, section headers and alignment of one frame
_STEP_FRAMES = 10  # at most: a step of more than a quarter of the ring is split into parts that are half as large
_TOKEN_BYTES = 12
_MAX_FINISHES = 256  # in one frame; what is more goes into the next
_MAX_REASONS = 256
_MAX_REASON_CHARS = 500


class Channel(Protocol):
    """The part of tokring_ipc.EngineChannel that the engine uses; tests bring their own."""

    def poll_request(self) -> RequestFrame | None: ...
    def release_requests(self) -> None: ...
    def new_cancels(self) -> bool: ...
    def cancelled(self, stream_slots: UInt32, generations: UInt32) -> NDArray[np.bool_]: ...
    def is_cancelled(self, stream_slot: int, slot_generation: int) -> bool: ...
    def write_step(
        self,
        stream_slot: UInt32,
        slot_generation: UInt32,
        token_id: Int32,
        finish: bytes | None = None,
        *,
        num_tokens: UInt32 | None = None,
        logprob_token_index: UInt32 | None = None,
        logprob_rank: Int32 | None = None,
        logprob: Float32 | None = None,
        top_id: Int32 | None = None,
        top_logprob: Float32 | None = None,
    ) -> bool: ...
    def write_prompt_logprobs(
        self,
        stream_slot: int,
        slot_generation: int,
        start: int,
        rank: Int32,
        logprob: Float32,
        top_id: Int32 | None = None,
        top_logprob: Float32 | None = None,
    ) -> bool: ...
    def publish(self) -> None: ...
    def ring(self) -> None: ...
    def out_free_bytes(self) -> int: ...


class FrontEnd:
    """A connection's output: what a step wrote, and finish rows that wait for ring space.

    The engine never blocks on a front end: it schedules a front end's rows only while `has_space`, so that everything
    a step can produce fits.
    """

    def __init__(
        self,
        index: int,
        channel: Channel,
        max_rows: int,
        logprobs_width: int,
        prompt_positions: int,
        num_drafts: int = 0,
    ) -> None:
        """`prompt_positions`: most prompt logprobs of one step; `num_drafts`: most tokens of a row beside the one."""
        self.index = index
        self.channel = channel
        self.stalled_since_ns = 0  # 0: not stalled
        self._max_rows = max_rows
        self._logprobs_bytes = 12 + 8 * logprobs_width
        self._prompt_positions = prompt_positions
        self._token_bytes = _TOKEN_BYTES + (4 + 4 * num_drafts if num_drafts else 0)
        self._finishes: list[bytes] = []
        self._reasons: OrderedDict[tuple[int, int], str] = OrderedDict()  # by slot and generation
        self._step_bytes = {flags: self._most_bytes(*flags) for flags in product((False, True), repeat=2)}

    def has_space(self, num_steps: int, *, logprobs: bool, prompt_logprobs: bool) -> bool:
        """Whether the ring has room for num_steps of the largest steps."""
        return self.channel.out_free_bytes() >= num_steps * self._step_bytes[logprobs, prompt_logprobs]

    def step_bytes(self, *, logprobs: bool, prompt_logprobs: bool) -> int:
        """Return the most that one step writes."""
        return self._step_bytes[logprobs, prompt_logprobs]

    def _most_bytes(self, logprobs: bool, prompt_logprobs: bool) -> int:
        row_bytes = self._token_bytes + (self._logprobs_bytes if logprobs else 0)
        needed = _STEP_FRAMES * _FRAME_OVERHEAD_BYTES + self._max_rows * row_bytes
        needed += _MAX_FINISHES * FINISH_DTYPE.itemsize
        if prompt_logprobs:
            needed += self._prompt_positions * (self._logprobs_bytes + _FRAME_OVERHEAD_BYTES)
        return needed

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now_ns: int,
        *,
        error: ErrorCode = ErrorCode.NONE,
        stop_id: int = -1,
        num_tokens: int | None = None,
        why: str = "",
    ) -> None:
        """Queue a request's finish row; it leaves with the next write. `why` is kept for explain()."""
        if why:
            self._keep_reason(request.stream_slot, request.slot_generation, why)
        total = len(request.token_ids) if num_tokens is None else num_tokens
        self._finishes.append(
            _FINISH.pack(
                request.stream_slot,
                request.slot_generation,
                reason,
                error,
                stop_id,
                request.num_prompt,
                request.num_cached if request.num_cached > 0 else 0,
                total - request.num_prompt,
                request.num_preemptions,
                request.scheduled_ns,
                request.first_token_ns,
                now_ns,
                request.num_drafted,
                request.num_accepted,
            )
        )

    def refuse(self, stream_slot: int, slot_generation: int, error: ErrorCode, now_ns: int, why: str) -> None:
        """Queue the finish row of a request that never was one."""
        self._keep_reason(stream_slot, slot_generation, why)
        row = (stream_slot, slot_generation, FinishReason.ERROR, error, -1, 0, 0, 0, 0, 0, 0, now_ns, 0, 0)
        self._finishes.append(_FINISH.pack(*row))

    def explain(self, stream_slot: int, slot_generation: int) -> str | None:
        """Why a request was refused, once; None if that is not known (any more)."""
        return self._reasons.pop((stream_slot, slot_generation), None)

    def _keep_reason(self, stream_slot: int, slot_generation: int, why: str) -> None:
        self._reasons[stream_slot, slot_generation] = why[:_MAX_REASON_CHARS]
        if len(self._reasons) > _MAX_REASONS:
            self._reasons.popitem(last=False)

    def write_several(
        self, stream_slot: UInt32, slot_generation: UInt32, columns: RequestColumns, sampled: SampledTokens
    ) -> bool:
        """Like write(), with the accepted drafts in front of each row's token: the end of its sequence."""
        assert sampled.num_accepted is not None
        rows, counts = sampled.rows, sampled.num_accepted + 1
        ends = np.cumsum(counts)
        starts = columns.token_base[rows] + columns.num_tokens[rows] - ends
        token_id = columns.token_ids[np.repeat(starts, counts) + np.arange(ends[-1])]
        logprobs = sampled.logprobs
        if logprobs is not None:  # of rows without drafts: one token each, at another place now
            logprobs = replace(logprobs, index=(ends - 1)[logprobs.index].astype(np.int32))
        return self.write(stream_slot, slot_generation, token_id, logprobs, num_tokens=counts.astype(np.uint32))

    def write(
        self,
        stream_slot: UInt32,
        slot_generation: UInt32,
        token_id: Int32,
        logprobs: Logprobs | None,
        *,
        num_tokens: UInt32 | None = None,
    ) -> bool:
        """Write one step's rows and the oldest queued finish rows; False if the ring is full (nothing is lost)."""
        sections: dict[str, Any] = {}
        if num_tokens is not None:
            sections["num_tokens"] = num_tokens
        if self._finishes:
            sections["finish"] = b"".join(self._finishes[:_MAX_FINISHES])
        if logprobs is not None:
            sections["logprob_token_index"] = logprobs.index.view(np.uint32)
            sections["logprob_rank"] = logprobs.rank
            sections["logprob"] = logprobs.logprob
            sections["top_id"] = logprobs.top_id
            sections["top_logprob"] = logprobs.top_logprob
        if not self.channel.write_step(stream_slot, slot_generation, token_id, **sections):
            return False
        del self._finishes[:_MAX_FINISHES]
        return True

    def write_prompt_logprobs(self, request: Request, logprobs: Logprobs) -> bool:
        """Write the logprobs of consecutive prompt positions of one request."""
        start = int(logprobs.index[0])
        return self.channel.write_prompt_logprobs(
            request.stream_slot,
            request.slot_generation,
            start,
            rank=logprobs.rank,
            logprob=logprobs.logprob,
            top_id=logprobs.top_id,
            top_logprob=logprobs.top_logprob,
        )

    def write_owed(self, num_steps: int = 0, *, logprobs: bool = False, prompt_logprobs: bool = False) -> bool:
        """Write the queued finish rows without a step, as far as there is space; whether anything was written.

        Space for num_steps of the largest steps is left: those in flight, which has_space() said may be launched.
        """
        wrote = False
        while self._finishes:
            if num_steps and not self.has_space(1 + num_steps, logprobs=logprobs, prompt_logprobs=prompt_logprobs):
                break
            if not self.write(_NO_UINT32, _NO_UINT32, _NO_INT32, None):
                break
            wrote = True
        return wrote

    @property
    def owes(self) -> bool:
        """Whether finish rows wait for ring space."""
        return bool(self._finishes)

    @property
    def num_owed(self) -> int:
        """Finish rows that wait for the next write or for ring space."""
        return len(self._finishes)


# Packed, without padding, as FINISH_DTYPE is: ipc asserts the size. Several times quicker than numpy.
_STRUCT_CODES = {"i4": "i", "i8": "q", "u2": "H", "u4": "I", "u8": "Q", "f4": "f"}
_FINISH = struct.Struct("<" + "".join(_STRUCT_CODES[FINISH_DTYPE[name].str[1:]] for name in FINISH_DTYPE.names or ()))
_NO_UINT32 = np.zeros(0, np.uint32)
_NO_INT32 = np.zeros(0, np.int32)
