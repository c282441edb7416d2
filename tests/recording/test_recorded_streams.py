"""What a front end's channel saw, found again by an equal request."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tokring.recording.recorded_streams import RecordedOutput, RecordedStreams
from tokring.recording.recording import Recording
from tokring.recording.recording_channel import RecordingChannel
from tokring.recording.recording_writer import RecordingWriter
from tokring_ipc import (
    FINISH_DTYPE,
    FRAME_HEADER_DTYPE,
    REQUEST_DTYPE,
    SECTION_DTYPE,
    ExtensionKind,
    FrameFlag,
    FrameType,
    RequestFlag,
    SectionKind,
    encode_extensions,
)

IDS = np.arange(40, 72, dtype=np.int32)
BIAS = encode_extensions([(ExtensionKind.LOGIT_BIAS, np.int32(77).tobytes() + np.float32(1.5).tobytes())])


class FakeFrame:
    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data = data
        self.type = int(data[:32].view(FRAME_HEADER_DTYPE)[0]["type"])


class FakeChannel:
    """Takes every request; gives out the frames it was made with."""

    def __init__(self, frames: list[npt.NDArray[np.uint8]]) -> None:
        self._frames = [FakeFrame(data) for data in frames]

    def submit(self, record: Any, ids: Any, extensions: bytes = b"") -> bool:
        return True

    def poll(self) -> FakeFrame | None:
        return self._frames.pop(0) if self._frames else None


def request(slot: int, generation: int = 1, **fields: Any) -> npt.NDArray[np.void]:
    record = np.zeros(1, REQUEST_DTYPE)
    for name, value in {"stream_slot": slot, "slot_generation": generation, "max_tokens": 4, **fields}.items():
        record[name] = value
    return record


def step(rows: list[tuple[int, int, int]], finished: list[tuple[int, int]] = ()) -> npt.NDArray[np.uint8]:  # type: ignore[assignment]
    """rows: (stream slot, slot generation, token id)."""
    header = np.zeros(1, FRAME_HEADER_DTYPE)
    columns = np.array(rows, np.uint32).reshape(-1, 3).T.tobytes()
    body = columns + bytes(-len(columns) % 8)
    if finished:
        finish = np.zeros(len(finished), FINISH_DTYPE)
        finish["stream_slot"], finish["slot_generation"] = np.array(finished).T
        section = np.zeros(1, SECTION_DTYPE)
        section["kind"], section["count"], section["bytes"] = SectionKind.FINISH, len(finished), finish.nbytes
        body += section.tobytes() + finish.tobytes()
        header["flags"] = FrameFlag.HAS_SECTIONS
    body += bytes(-(len(body) + 32) % 64)
    header["length"], header["type"], header["count"] = 32 + len(body), FrameType.STEP, len(rows)
    return np.frombuffer(header.tobytes() + body, np.uint8)


def record(
    path: Path, requests: list[npt.NDArray[np.void]], frames: list[npt.NDArray[np.uint8]], *, redact: bool = False
) -> RecordedStreams:
    writer = RecordingWriter(path, {"redacted": redact}, max_bytes=1 << 20)
    channel = RecordingChannel(FakeChannel(frames), writer, redact=redact)
    for each in requests:
        assert channel.submit(each, IDS, BIAS)
    while channel.poll() is not None:
        pass
    writer.close()
    return RecordedStreams(Recording(path))


def tokens(streams: RecordedStreams, asked: npt.NDArray[np.void], ids: Any = IDS, extensions: bytes = BIAS) -> Any:
    """The tokens of the answer; None if there is none."""
    stream = streams.take(asked, ids, extensions)
    if stream is None:
        return None
    return [
        token for output in stream.outputs if isinstance(output, RecordedOutput) for token in output.token_id.tolist()
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traffic"


def test_equal_requests_get_their_answers_in_the_order_of_recording(path: Path) -> None:
    frames = [step([(0, 1, 10), (1, 1, 20)]), step([(0, 1, 11), (1, 1, 21)], [(0, 1), (1, 1)])]
    streams = record(path, [request(0), request(1)], frames)
    assert [tokens(streams, request(7, generation=9, arrival_ns=5)) for _ in range(3)] == [[10, 11], [20, 21], None]


def test_a_slot_used_again_belongs_to_its_next_request(path: Path) -> None:
    frames = [step([(0, 1, 10)], [(0, 1)]), step([(0, 2, 20)], [(0, 2)])]
    streams = record(path, [request(0), request(0, generation=2, max_tokens=5)], frames)
    assert tokens(streams, request(3, max_tokens=5)) == [20]


def test_another_prompt_parameter_or_extension_is_another_request(path: Path) -> None:
    streams = record(path, [request(0)], [step([(0, 1, 10)], [(0, 1)])])
    assert tokens(streams, request(0), ids=IDS + 1) is None
    assert tokens(streams, request(0, max_tokens=3)) is None
    assert tokens(streams, request(0), extensions=b"") is None
    assert tokens(streams, request(0)) == [10]


def test_a_seed_counts_only_if_the_client_gave_it(path: Path) -> None:
    drawn, given = request(0, seed=1), request(1, seed=2, flags=int(RequestFlag.SEED_GIVEN))
    streams = record(path, [drawn, given], [step([(0, 1, 10), (1, 1, 20)], [(0, 1), (1, 1)])])
    assert tokens(streams, request(0, seed=99)) == [10]
    assert tokens(streams, request(0, seed=99, flags=int(RequestFlag.SEED_GIVEN))) is None
    assert tokens(streams, request(0, seed=2, flags=int(RequestFlag.SEED_GIVEN))) == [20]


def test_a_request_that_had_not_ended_is_not_given_out(path: Path) -> None:
    assert tokens(record(path, [request(0)], [step([(0, 1, 10)])]), request(0)) is None


def test_streams_of_one_http_request_know_each_other(path: Path) -> None:
    requests = [request(0, arrival_ns=5), request(1, arrival_ns=5, choice_index=1), request(2, arrival_ns=6)]
    streams = record(path, requests, [step([], [(0, 1), (1, 1), (2, 1)])])
    first = streams.take(request(0), IDS, BIAS)
    assert first is not None and len(first.siblings) == 2


def test_redacted_prompts_are_nowhere_in_the_file_and_their_answers_still_found(path: Path) -> None:
    streams = record(path, [request(0)], [step([(0, 1, 10)], [(0, 1)])], redact=True)
    data = path.read_bytes()
    assert IDS[:4].tobytes() not in data and np.float32(1.5).tobytes() not in data
    assert tokens(streams, request(0), ids=IDS[1:]) is None
    assert tokens(streams, request(0)) == [10]
