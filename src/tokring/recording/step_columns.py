"""StepColumns: the columns of a recorded STEP or PROMPT_LOGPROBS frame, by the offsets of docs/ipc-protocol.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.recording.file_format import RecordingError
from tokring_ipc import (
    FINISH_DTYPE,
    FRAME_HEADER_DTYPE,
    PROMPT_LOGPROBS_DTYPE,
    SECTION_DTYPE,
    FrameFlag,
    SectionKind,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobColumns:
    """rank i32[n], logprob f32[n], top_id i32[n, width], top_logprob f32[n, width]."""

    rank: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    top_id: npt.NDArray[np.int32]
    top_logprob: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """first_token i64[rows + 1]: row i owns token_id[first_token[i]:first_token[i + 1]]."""

    publish_ns: int
    stream_slot: npt.NDArray[np.uint32]
    slot_generation: npt.NDArray[np.uint32]
    first_token: npt.NDArray[np.int64]
    token_id: npt.NDArray[np.int32]
    finish: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, FINISH_DTYPE))
    logprob_token: npt.NDArray[np.uint32] | None = None  # index into token_id, ascending
    logprobs: LogprobColumns | None = None


class _Cursor:
    """Takes arrays one after another, never past the end."""

    def __init__(self, data: npt.NDArray[np.uint8], offset: int = 0) -> None:
        self._data = data
        self.offset = offset

    def take(self, dtype: Any, count: int) -> npt.NDArray[Any]:
        stop = self.offset + int(count) * np.dtype(dtype).itemsize
        if stop > len(self._data):
            raise RecordingError(f"a recorded frame of {len(self._data)} bytes ends within a column")
        column: npt.NDArray[Any] = self._data[self.offset : stop].view(dtype)
        self.offset = stop
        return column

    def align(self) -> None:
        self.offset = -(-self.offset // 8) * 8


def frame_type(data: npt.NDArray[np.uint8]) -> int:
    return int(_Cursor(data).take(FRAME_HEADER_DTYPE, 1)[0]["type"])


def read_step(data: npt.NDArray[np.uint8]) -> StepColumns:
    """Views into `data`. Raises RecordingError if the frame does not hold together."""
    cursor = _Cursor(data)
    header = cursor.take(FRAME_HEADER_DTYPE, 1)[0]
    rows, flags = int(header["count"]), int(header["flags"])
    slot, generation = cursor.take(np.uint32, rows), cursor.take(np.uint32, rows)
    counts = cursor.take(np.uint32, rows) if flags & FrameFlag.MULTI_TOKEN else np.ones(rows, np.uint32)
    first_token = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    token_id = cursor.take(np.int32, int(first_token[-1]))
    sections = _read_sections(data, cursor) if flags & FrameFlag.HAS_SECTIONS else {}
    return StepColumns(
        publish_ns=int(header["publish_ns"]),
        stream_slot=slot,
        slot_generation=generation,
        first_token=first_token,
        token_id=token_id,
        **sections,
    )


def _read_sections(data: npt.NDArray[np.uint8], cursor: _Cursor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cursor.align()
    while cursor.offset + SECTION_DTYPE.itemsize <= len(data):
        section = cursor.take(SECTION_DTYPE, 1)[0]
        body = _Cursor(data, cursor.offset)
        count = int(section["count"])
        if section["kind"] == SectionKind.FINISH:
            found["finish"] = body.take(FINISH_DTYPE, count)
        elif section["kind"] == SectionKind.LOGPROBS:
            found["logprob_token"] = body.take(np.uint32, count)
            found["logprobs"] = _read_logprobs(body, count, int(section["width"]))
        else:
            break
        cursor.take(np.uint8, int(section["bytes"]))
    return found


def _read_logprobs(cursor: _Cursor, count: int, width: int) -> LogprobColumns:
    rank, logprob = cursor.take(np.int32, count), cursor.take(np.float32, count)
    top_id = cursor.take(np.int32, count * width).reshape(count, width)
    top_logprob = cursor.take(np.float32, count * width).reshape(count, width)
    return LogprobColumns(rank=rank, logprob=logprob, top_id=top_id, top_logprob=top_logprob)


def read_prompt_logprobs(data: npt.NDArray[np.uint8]) -> tuple[np.void, LogprobColumns]:
    """(PROMPT_LOGPROBS_DTYPE record, columns by position)."""
    cursor = _Cursor(data)
    header = cursor.take(FRAME_HEADER_DTYPE, 1)[0]
    record: np.void = cursor.take(PROMPT_LOGPROBS_DTYPE, 1)[0]
    return record, _read_logprobs(cursor, int(header["count"]), int(record["width"]))
