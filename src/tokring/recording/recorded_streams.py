"""RecordedStreams: a recording taken apart by request, to be asked for by an equal request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.recording.file_format import EntryKind
from tokring.recording.recording import Recording
from tokring.recording.step_columns import (
    LogprobColumns,
    StepColumns,
    frame_type,
    read_prompt_logprobs,
    read_step,
)
from tokring_ipc import FRAME_HEADER_DTYPE, REQUEST_DTYPE, FrameType, RequestFlag

# Differ between two runs of the same client; a seed that the front end drew does too.
RUN_DEPENDENT_FIELDS = ("stream_slot", "slot_generation", "parent_slot", "arrival_ns", "deadline_ns")


@dataclass(slots=True)
class RecordedOutput:
    """What one frame held for one request: tokens, and its finish record if it ended there."""

    publish_ns: int  # when it was recorded
    token_id: npt.NDArray[np.int32]
    logprob_token: npt.NDArray[np.uint32] | None = None  # index into token_id
    logprobs: LogprobColumns | None = None
    finish: np.void | None = None


@dataclass(slots=True)
class RecordedPromptLogprobs:
    publish_ns: int
    start: int  # first position
    logprobs: LogprobColumns


@dataclass(slots=True)
class RecordedStream:
    """One request and everything the engine answered. Without a finish record: the recording ended before it did."""

    submitted_ns: int
    # The streams of one HTTP request (choices, prompts of a list), this one included: a client sees their order.
    siblings: list[RecordedStream]
    outputs: list[RecordedOutput | RecordedPromptLogprobs] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        last = self.outputs[-1] if self.outputs else None
        return isinstance(last, RecordedOutput) and last.finish is not None


class RecordedStreams:
    """Finds, for a request, the answer to the first equal one that has not been given out yet."""

    def __init__(self, recording: Recording) -> None:
        """Raises RecordingError for a damaged recording."""
        self.is_redacted = bool(recording.metadata.get("redacted"))
        self.num_missing = 0  # entries that the recording lacks
        self._by_key: dict[bytes, deque[RecordedStream]] = {}
        self._live: dict[tuple[int, int], RecordedStream] = {}
        self._last_arrival_ns = 0
        self._siblings: list[RecordedStream] = []
        for entry in recording.entries():
            if entry.kind is EntryKind.REQUEST:
                self._add_request(entry.time_ns, entry.payload)
            elif entry.kind is EntryKind.FRAME:
                self._add_frame(np.frombuffer(entry.payload, np.uint8))
            elif entry.kind is EntryKind.CONNECTED:
                self._live.clear()
            elif entry.kind is EntryKind.GAP:
                self.num_missing += int.from_bytes(entry.payload, "little")

    @property
    def num_left(self) -> int:
        return sum(len(streams) for streams in self._by_key.values())

    def take(self, record: Any, ids: npt.NDArray[np.int32], extensions: bytes) -> RecordedStream | None:
        """None: no (further) equal request is in the recording, or it had not ended when the recording did."""
        streams = self._by_key.get(self._key(record, ids, extensions))
        while streams:
            stream = streams.popleft()
            if stream.is_complete:
                return stream
        return None

    def _key(self, record: Any, ids: npt.NDArray[np.int32], extensions: bytes) -> bytes:
        copy = np.array(record, REQUEST_DTYPE).reshape(1)
        for name in RUN_DEPENDENT_FIELDS:
            copy[name] = 0
        if not int(copy["flags"][0]) & RequestFlag.SEED_GIVEN:
            copy["seed"] = 0
        copy["num_ids"] = len(ids)
        copy["extension_bytes"] = 0
        if self.is_redacted:
            return copy.tobytes()
        return copy.tobytes() + ids.tobytes() + extensions

    def _add_request(self, time_ns: int, payload: memoryview) -> None:
        record = np.frombuffer(payload, REQUEST_DTYPE, 1)[0]
        num_ids = int(record["num_ids"])
        ids = np.frombuffer(payload, np.int32, num_ids, REQUEST_DTYPE.itemsize)
        extensions = bytes(payload[REQUEST_DTYPE.itemsize + 4 * num_ids :])
        if int(record["arrival_ns"]) != self._last_arrival_ns:  # one HTTP request's are submitted in a row
            self._last_arrival_ns, self._siblings = int(record["arrival_ns"]), []
        stream = RecordedStream(time_ns, self._siblings)
        self._siblings.append(stream)
        self._by_key.setdefault(self._key(record, ids, extensions), deque()).append(stream)
        self._live[int(record["stream_slot"]), int(record["slot_generation"])] = stream

    def _add_frame(self, data: npt.NDArray[np.uint8]) -> None:
        kind = frame_type(data)
        if kind == FrameType.STEP:
            self._add_step(read_step(data))
        elif kind == FrameType.PROMPT_LOGPROBS:
            record, columns = read_prompt_logprobs(data)
            stream = self._live.get((int(record["stream_slot"]), int(record["slot_generation"])))
            if stream is not None:
                publish_ns = int(data[: FRAME_HEADER_DTYPE.itemsize].view(FRAME_HEADER_DTYPE)[0]["publish_ns"])
                stream.outputs.append(RecordedPromptLogprobs(publish_ns, int(record["start"]), columns))

    def _add_step(self, step: StepColumns) -> None:
        of_this_step: dict[tuple[int, int], RecordedOutput] = {}
        requests = zip(step.stream_slot.tolist(), step.slot_generation.tolist(), strict=True)
        for row, request in enumerate(requests):
            stream = self._live.get(request)
            if stream is not None:
                output = _row_output(step, row)
                stream.outputs.append(output)
                of_this_step[request] = output
        for finish in step.finish:
            request = int(finish["stream_slot"]), int(finish["slot_generation"])
            stream = self._live.pop(request, None)
            if stream is None:
                continue
            if request not in of_this_step:
                nothing = np.zeros(0, np.int32)
                of_this_step[request] = RecordedOutput(step.publish_ns, nothing)
                stream.outputs.append(of_this_step[request])
            of_this_step[request].finish = finish


def _row_output(step: StepColumns, row: int) -> RecordedOutput:
    first, stop = int(step.first_token[row]), int(step.first_token[row + 1])
    output = RecordedOutput(step.publish_ns, step.token_id[first:stop])
    if step.logprobs is not None and step.logprob_token is not None:
        start, end = (int(place) for place in np.searchsorted(step.logprob_token, (first, stop)))
        if end > start:
            output.logprob_token = step.logprob_token[start:end] - np.uint32(first)
            output.logprobs = LogprobColumns(
                rank=step.logprobs.rank[start:end],
                logprob=step.logprobs.logprob[start:end],
                top_id=step.logprobs.top_id[start:end],
                top_logprob=step.logprobs.top_logprob[start:end],
            )
    return output
