"""StepFrame: one STEP frame of the OUT ring as Python values, every count and offset checked."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokring.server.token_path.interface import Finish, FrameError

# The layout of ipc/include/tokring/layout.hpp, spelled out: this module is the check on the native reader.
FRAME_HEADER = struct.Struct("<IHHQQII")  # length, type, flags, position, publish_ns, count, crc32c
SECTION_HEADER = struct.Struct("<HHIII")  # kind, width, count, bytes, reserved
FINISH_RECORD = struct.Struct("<IIHHiIIIIQQQII")
STEP_TYPE = 1
MULTI_TOKEN, HAS_SECTIONS = 1, 2
FINISH_SECTION, LOGPROBS_SECTION = 1, 2
MAX_LOGPROBS = 20


class LogprobRow(NamedTuple):
    logprob: float
    top: list[tuple[int, float]]  # best first; unused places of the row are left out


class FinishRow(NamedTuple):
    stream_slot: int
    slot_generation: int
    finish: Finish


class StepFrame(NamedTuple):
    publish_ns: int
    stream_slot: list[int]
    slot_generation: list[int]
    first_token: list[int]  # [rows + 1]: row i owns token_id[first_token[i]:first_token[i + 1]]
    token_id: list[int]
    logprobs: dict[int, LogprobRow]  # by index into token_id
    finish: list[FinishRow]


def read_step_frame(address: int, length: int, num_stream_slots: int) -> StepFrame:
    """Copies and checks a frame. Raises FrameError on anything that does not hold together."""
    if length < FRAME_HEADER.size:
        raise FrameError(f"frame of {length} bytes is shorter than its header")
    data = ctypes.string_at(address, length)
    stated, frame_type, flags, _, publish_ns, count, _ = FRAME_HEADER.unpack_from(data)
    if stated != length or frame_type != STEP_TYPE:
        raise FrameError(f"frame states type {frame_type}, {stated} bytes; a STEP frame of {length} bytes was expected")
    columns = _Columns(data, FRAME_HEADER.size)
    slots = columns.take(np.uint32, count)
    generations = columns.take(np.uint32, count)
    num_tokens = columns.take(np.uint32, count) if flags & MULTI_TOKEN else np.ones(count, dtype=np.uint32)
    first_token = [0, *np.cumsum(num_tokens, dtype=np.uint64).tolist()]
    token_id = columns.take(np.int32, first_token[-1])
    finish: list[FinishRow] = []
    logprobs: dict[int, LogprobRow] = {}
    if flags & HAS_SECTIONS:
        for kind, width, rows, section in _sections(data, -(-columns.offset // 8) * 8):
            if kind == FINISH_SECTION:
                finish = [_finish_row(section.take(np.uint8, FINISH_RECORD.size)) for _ in range(rows)]
            else:
                logprobs = _logprob_rows(section, width, rows, len(token_id))
    worst = max([0, *slots.tolist(), *(row.stream_slot for row in finish)])
    if worst >= num_stream_slots:
        raise FrameError(f"stream slot {worst} is not below {num_stream_slots}")
    return StepFrame(publish_ns, slots.tolist(), generations.tolist(), first_token, token_id.tolist(), logprobs, finish)


class _Columns:
    """Takes arrays from a stretch of bytes, one after another, never past its end."""

    def __init__(self, data: bytes, offset: int, end: int | None = None) -> None:
        self.data = data
        self.offset = offset
        self.end = len(data) if end is None else end

    def take(self, dtype: type[np.generic], count: int) -> npt.NDArray[np.generic]:
        num_bytes = count * np.dtype(dtype).itemsize
        if num_bytes > self.end - self.offset:
            raise FrameError(f"a column of {num_bytes} bytes does not fit into the {self.end - self.offset} left")
        column = np.frombuffer(self.data, dtype=dtype, count=count, offset=self.offset)
        self.offset += num_bytes
        return column


def _sections(data: bytes, offset: int) -> list[tuple[int, int, int, _Columns]]:
    sections: list[tuple[int, int, int, _Columns]] = []
    last_kind = 0
    while offset + SECTION_HEADER.size <= len(data):
        kind, width, count, num_bytes, _ = SECTION_HEADER.unpack_from(data, offset)
        if kind == 0:
            break
        start = offset + SECTION_HEADER.size
        if kind <= last_kind or kind > LOGPROBS_SECTION or num_bytes % 8 or start + num_bytes > len(data):
            raise FrameError(f"section of kind {kind} with {num_bytes} bytes at {offset} of {len(data)}")
        sections.append((kind, width, count, _Columns(data, start, start + num_bytes)))
        last_kind, offset = kind, start + num_bytes
    return sections


def _finish_row(record: npt.NDArray[np.generic]) -> FinishRow:
    slot, generation, *values = FINISH_RECORD.unpack(record.tobytes())
    return FinishRow(slot, generation, Finish(*values))


def _logprob_rows(section: _Columns, width: int, count: int, num_tokens: int) -> dict[int, LogprobRow]:
    if width > MAX_LOGPROBS:
        raise FrameError(f"{width} logprobs a token, at most {MAX_LOGPROBS} are allowed")
    token_index = section.take(np.uint32, count).tolist()
    section.take(np.int32, count)  # rank: not shown to clients
    logprob = section.take(np.float32, count).tolist()
    top_id = section.take(np.int32, count * width).reshape(count, width).tolist()
    top_logprob = section.take(np.float32, count * width).reshape(count, width).tolist()
    if token_index and max(token_index) >= num_tokens:
        raise FrameError(f"logprobs of token {max(token_index)} in a frame of {num_tokens} tokens")
    rows = (
        LogprobRow(chosen, [(top, value) for top, value in zip(ids, values, strict=True) if top >= 0])
        for chosen, ids, values in zip(logprob, top_id, top_logprob, strict=True)
    )
    return dict(zip(token_index, rows, strict=True))
