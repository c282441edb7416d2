"""ReplayCore: answers requests with what an engine answered when they were recorded. No model, no scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokring.engine.core import CloseFrontEnd
from tokring.engine.engine_config import EngineConfig
from tokring.recording.recorded_streams import RecordedOutput, RecordedPromptLogprobs, RecordedStream, RecordedStreams
from tokring_ipc import (
    FINISH_DTYPE,
    CallStatus,
    EngineChannel,
    ErrorCode,
    FinishReason,
    PeerCorrupt,
    PeerGone,
    encode_extensions,
)

logger = logging.getLogger(__name__)

MAX_INTAKE_PER_STEP = 64
MAX_FINISHES = 256  # in one frame
SIBLING_TIMEOUT_NS = 1_000_000_000


@dataclass(slots=True)
class PlayedStream:
    """A stream that is being answered."""

    stream_slot: int
    slot_generation: int
    recorded: RecordedStream
    delay_ns: int  # of this run behind the recorded one
    next_output: int = 0
    num_tokens: int = 0

    @property
    def due(self) -> RecordedOutput | RecordedPromptLogprobs | None:
        outputs = self.recorded.outputs
        return outputs[self.next_output] if self.next_output < len(outputs) else None


@dataclass(slots=True)
class PlayedRequest:
    """The streams of one HTTP request: they are answered in the order among them that was recorded."""

    started_ns: int
    siblings: list[RecordedStream]
    num_arrived: int = 0
    streams: list[PlayedStream] = field(default_factory=list)

    def next_publish_ns(self) -> int | None:
        """The recorded time of what comes next; None: all is out."""
        return min((due.publish_ns for stream in self.streams if (due := stream.due) is not None), default=None)

    def awaits_siblings(self, publish_ns: int, now_ns: int) -> bool:
        """Whether a stream that had been there at that time is still on its way."""
        expected = sum(stream.submitted_ns <= publish_ns for stream in self.siblings)
        return self.num_arrived < expected and now_ns < self.started_ns + SIBLING_TIMEOUT_NS


class PlayedFrontEnd:
    """One connected front end and its requests."""

    def __init__(self, channel: EngineChannel) -> None:
        self.channel = channel
        self.requests: dict[int, PlayedRequest] = {}  # by arrival_ns
        self.finishes: list[NDArray[np.void]] = []  # owed without a token

    @property
    def streams(self) -> list[PlayedStream]:
        return [stream for request in self.requests.values() for stream in request.streams]

    def remove_ended(self, ended: Callable[[PlayedStream], bool]) -> None:
        for arrival_ns, request in tuple(self.requests.items()):
            request.streams = [stream for stream in request.streams if not ended(stream)]
            if not request.streams:
                del self.requests[arrival_ns]

    def step_bytes(self, *, logprobs: bool, prompt_logprobs: bool) -> int:
        """Nothing is reserved: what does not fit waits for the next step."""
        return 0


class ReplayCore:
    """In EngineCore's place behind an EngineLoop; single thread.

    At full speed a request gets one recorded frame a step; else each at the delay after the request at which it was
    published when it was recorded.
    """

    def __init__(self, config: EngineConfig, streams: RecordedStreams, page: Any, *, is_full_speed: bool) -> None:
        self.config = config
        self.on_corrupt: CloseFrontEnd | None = None
        self.is_paused = False
        self._streams = streams
        self._page = page
        self._is_full_speed = is_full_speed
        self._front_ends: dict[int, PlayedFrontEnd] = {}

    @property
    def has_work(self) -> bool:
        return any(front_end.requests or front_end.finishes for front_end in self._front_ends.values())

    def attach(self, index: int, channel: EngineChannel) -> PlayedFrontEnd:
        self._front_ends[index] = front_end = PlayedFrontEnd(channel)
        return front_end

    def detach(self, index: int) -> None:
        self._front_ends.pop(index, None)

    def finish_all(self, index: int, reason: FinishReason) -> int:
        """End every request of one front end; its finish records leave with the next step."""
        front_end = self._front_ends.get(index)
        if front_end is None:
            return 0
        streams = front_end.streams
        front_end.finishes += [_cut_off(stream, reason) for stream in streams]
        front_end.requests.clear()
        return len(streams)

    def answer(self, call: Any, front_end: int) -> None:
        """Control calls are for engines with a model."""
        try:
            call.refuse(CallStatus.UNKNOWN_METHOD, "a replayed recording serves no control calls")
        except (PeerGone, BlockingIOError) as error:
            logger.warning("the answer to control call %s is lost: %s", call.method, error)

    def step(self) -> bool:
        """Receive → take what is due → publish. Returns whether anything was written."""
        now_ns = time.monotonic_ns()
        wrote = False
        for index, front_end in tuple(self._front_ends.items()):
            try:
                self._receive(front_end, now_ns)
            except PeerCorrupt as error:
                self.detach(index)
                if self.on_corrupt is not None:
                    self.on_corrupt(index, str(error))
                continue
            _end_cancelled(front_end)
            wrote |= self._write_due(front_end, now_ns)
        self._page.set("num_requests_running", sum(len(each.streams) for each in self._front_ends.values()))
        if wrote:
            self._page.add("steps")
        return wrote

    def _receive(self, front_end: PlayedFrontEnd, now_ns: int) -> None:
        for _ in range(MAX_INTAKE_PER_STEP):
            frame = front_end.channel.poll_request()
            if frame is None:
                return
            front_end.channel.release_requests()
            self._page.add("num_requests_intake")
            recorded = self._streams.take(frame.record, frame.ids, encode_extensions(frame.extensions))
            if recorded is None:
                logger.warning(
                    "a request of %d tokens is not in the recording, or not (again) to its end", frame.num_ids
                )
                refused = PlayedStream(frame.stream_slot, frame.slot_generation, RecordedStream(0, []), 0)
                front_end.finishes.append(_cut_off(refused, FinishReason.ERROR, ErrorCode.INVALID_REQUEST))
                continue
            arrival_ns = int(frame.record["arrival_ns"])
            request = front_end.requests.setdefault(arrival_ns, PlayedRequest(now_ns, recorded.siblings))
            request.num_arrived += 1
            delay_ns = request.started_ns - request.siblings[0].submitted_ns
            request.streams.append(PlayedStream(frame.stream_slot, frame.slot_generation, recorded, delay_ns))

    def _write_due(self, front_end: PlayedFrontEnd, now_ns: int) -> bool:
        """What each request's next recorded frame held for it, if its time has come, in one frame."""
        played = [stream for request in front_end.requests.values() for stream in self._due(request, now_ns)]
        wrote = False
        for stream in played:
            if isinstance(part := stream.due, RecordedPromptLogprobs):
                wrote |= _write_prompt_logprobs(front_end.channel, stream, part)
        outputs = [(stream, due) for stream in played if isinstance(due := stream.due, RecordedOutput)]
        if (outputs or front_end.finishes) and _write_outputs(front_end, outputs):
            for stream, output in outputs:
                stream.next_output += 1
                stream.num_tokens += len(output.token_id)
            front_end.remove_ended(lambda stream: stream.due is None)
            wrote = True
        if wrote:
            front_end.channel.publish()
            front_end.channel.ring()
        return wrote

    def _due(self, request: PlayedRequest, now_ns: int) -> list[PlayedStream]:
        publish_ns = request.next_publish_ns()
        if publish_ns is None or request.awaits_siblings(publish_ns, now_ns):
            return []
        delay_ns = request.started_ns - request.siblings[0].submitted_ns
        if not self._is_full_speed and now_ns < publish_ns + delay_ns:
            return []
        return [stream for stream in request.streams if stream.due is not None and stream.due.publish_ns == publish_ns]


def _end_cancelled(front_end: PlayedFrontEnd) -> None:
    streams = front_end.streams
    if not streams:
        return
    slots = np.array([stream.stream_slot for stream in streams], np.uint32)
    generations = np.array([stream.slot_generation for stream in streams], np.uint32)
    cancelled = front_end.channel.cancelled(slots, generations)
    if cancelled.any():
        gone = {slot for slot, is_gone in zip(slots.tolist(), cancelled.tolist(), strict=True) if is_gone}
        front_end.finishes += [_cut_off(stream, FinishReason.ABORT) for stream in streams if stream.stream_slot in gone]
        front_end.remove_ended(lambda stream: stream.stream_slot in gone)


def _write_prompt_logprobs(channel: EngineChannel, stream: PlayedStream, part: RecordedPromptLogprobs) -> bool:
    """False if the ring has no room now."""
    columns = part.logprobs
    if not channel.write_prompt_logprobs(
        stream.stream_slot,
        stream.slot_generation,
        part.start,
        rank=_own(columns.rank),
        logprob=_own(columns.logprob),
        top_id=_own(columns.top_id),
        top_logprob=_own(columns.top_logprob),
    ):
        return False
    stream.next_output += 1
    return True


def _write_outputs(front_end: PlayedFrontEnd, outputs: list[tuple[PlayedStream, RecordedOutput]]) -> bool:
    """False if the ring has no room now; nothing is written then."""
    finishes = front_end.finishes[:MAX_FINISHES]
    num_owed = len(finishes)
    finishes += [_finish_for(stream, output.finish) for stream, output in outputs if output.finish is not None]
    with_tokens = [(stream, output) for stream, output in outputs if len(output.token_id)]
    counts = np.array([len(output.token_id) for _, output in with_tokens], np.uint32)
    slots = np.array([stream.stream_slot for stream, _ in with_tokens], np.uint32)
    generations = np.array([stream.slot_generation for stream, _ in with_tokens], np.uint32)
    sections = _logprob_sections([output for _, output in with_tokens])
    if finishes:
        sections["finish"] = np.concatenate(finishes)
    if (counts > 1).any():
        sections["num_tokens"] = counts
    tokens = np.concatenate([output.token_id for _, output in with_tokens]) if with_tokens else np.zeros(0, np.int32)
    if not front_end.channel.write_step(slots, generations, tokens, **sections):
        return False
    del front_end.finishes[:num_owed]
    return True


def _logprob_sections(outputs: list[RecordedOutput]) -> dict[str, Any]:
    """The logprob columns of several outputs as one section; narrower rows are filled with id -1."""
    firsts = np.cumsum([0, *(len(output.token_id) for output in outputs)])
    parts = [
        (output.logprob_token + np.uint32(first), output.logprobs)
        for output, first in zip(outputs, firsts, strict=False)
        if output.logprob_token is not None and output.logprobs is not None
    ]
    if not parts:
        return {}
    width = max(columns.top_id.shape[1] for _, columns in parts)
    return {
        "logprob_token_index": np.concatenate([places for places, _ in parts]).astype(np.uint32),
        "logprob_rank": np.concatenate([columns.rank for _, columns in parts]),
        "logprob": np.concatenate([columns.logprob for _, columns in parts]),
        "top_id": np.concatenate([_widened(columns.top_id, width, -1) for _, columns in parts]),
        "top_logprob": np.concatenate([_widened(columns.top_logprob, width, 0) for _, columns in parts]),
    }


def _widened(column: NDArray[Any], width: int, filling: int) -> NDArray[Any]:
    return np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=filling)


def _own(column: NDArray[Any]) -> NDArray[Any]:
    """Aligned, writable memory: the file's bytes are neither."""
    return np.array(column)


def _finish_for(stream: PlayedStream, recorded: np.void) -> NDArray[np.void]:
    """The recorded record under this run's slot; its times move with the request."""
    finish = np.array([recorded], FINISH_DTYPE)
    finish["stream_slot"], finish["slot_generation"] = stream.stream_slot, stream.slot_generation
    for name in ("scheduled_ns", "first_token_ns", "end_ns"):
        if int(finish[name][0]):
            finish[name] = max(1, int(finish[name][0]) + stream.delay_ns)
    return finish


def _cut_off(stream: PlayedStream, reason: FinishReason, error: ErrorCode = ErrorCode.NONE) -> NDArray[np.void]:
    """The finish record of a request that does not get to its recorded end."""
    last = stream.recorded.outputs[-1] if stream.recorded.outputs else None
    recorded = last.finish if isinstance(last, RecordedOutput) else None
    finish = np.zeros(1, FINISH_DTYPE) if recorded is None else _finish_for(stream, recorded)
    finish["stream_slot"], finish["slot_generation"] = stream.stream_slot, stream.slot_generation
    finish["reason"], finish["error_code"] = reason, error
    finish["num_output_tokens"], finish["stop_id"] = stream.num_tokens, -1
    return finish
