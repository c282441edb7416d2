"""The recording file: bounded, rotating, never in the way, and readable up to where it ends."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import wait_until
from tokring.recording.file_format import GAP, EntryKind, RecordingError, encode_entry
from tokring.recording.recording import Recording
from tokring.recording.recording_writer import RecordingWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traffic"


@pytest.fixture
def writer(path: Path) -> Iterator[RecordingWriter]:
    writer = RecordingWriter(path, {"model": "some"}, max_bytes=1 << 20)
    yield writer
    writer.close()


def payloads(path: Path) -> list[tuple[EntryKind, bytes]]:
    return [(entry.kind, bytes(entry.payload)) for entry in Recording(path).entries()]


def test_entries_come_back_in_order_with_their_time_and_their_exact_length(path: Path, writer: RecordingWriter) -> None:
    for length in range(20):
        writer.append(EntryKind.FRAME, b"x" * length, time_ns=length)
    writer.close()
    recording = Recording(path)
    assert recording.metadata == {"model": "some"}
    assert [(entry.time_ns, len(entry.payload)) for entry in recording.entries()] == [(n, n) for n in range(20)]


def test_the_file_and_the_one_before_it_stay_within_the_bound_and_hold_the_newest(path: Path) -> None:
    writer = RecordingWriter(path, {}, max_bytes=1 << 16)
    writer.preamble = [encode_entry(EntryKind.CONNECTED, 0, b"ready")]
    for number in range(1000):
        writer.append(EntryKind.FRAME, number.to_bytes(256, "little"))
    writer.close()
    older = path.with_name("traffic.1")
    assert path.stat().st_size + older.stat().st_size <= (1 << 16) + 1024
    assert payloads(path)[0] == (EntryKind.CONNECTED, b"ready")
    numbers = [
        int.from_bytes(payload, "little")
        for file in (older, path)
        for kind, payload in payloads(file)
        if kind == EntryKind.FRAME
    ]
    assert numbers == list(range(numbers[0], 1000))


def test_what_a_slow_disk_does_not_take_is_dropped_counted_and_noted(path: Path, monkeypatch: Any) -> None:
    is_stuck = threading.Event()
    real = RecordingWriter._write_batch

    def stuck(writer: RecordingWriter) -> None:
        is_stuck.wait()
        real(writer)

    monkeypatch.setattr(RecordingWriter, "_write_batch", stuck)
    writer = RecordingWriter(path, {}, max_bytes=1 << 20, max_buffered_bytes=1000)
    for _ in range(50):
        writer.append(EntryKind.FRAME, bytes(100))
    assert writer.num_dropped == 50 - 8
    is_stuck.set()
    wait_until(lambda: not writer._entries, "the disk has caught up")
    writer.append(EntryKind.FRAME, b"after")
    writer.close()
    assert payloads(path)[8:] == [(EntryKind.GAP, GAP.pack(42)), (EntryKind.FRAME, b"after")]


def test_a_full_disk_ends_the_recording_and_nothing_else(writer: RecordingWriter, monkeypatch: Any) -> None:
    def full(self: RecordingWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordingWriter, "_write_batch", full)
    writer.append(EntryKind.FRAME, b"x")
    wait_until(lambda: writer._has_failed, "the error is noticed")
    writer.append(EntryKind.FRAME, b"x")
    assert writer.num_dropped == 1


def test_a_torn_end_ends_the_recording_and_a_damaged_entry_is_named(path: Path, writer: RecordingWriter) -> None:
    writer.append(EntryKind.FRAME, b"whole")
    writer.append(EntryKind.FRAME, b"torn later")
    writer.close()
    data = path.read_bytes()
    path.write_bytes(data[:-9])
    assert payloads(path) == [(EntryKind.FRAME, b"whole")]
    damaged = bytearray(data)
    damaged[data.index(b"whole") - 12 : data.index(b"whole") - 10] = (99).to_bytes(2, "little")
    path.write_bytes(damaged)
    with pytest.raises(RecordingError, match="damaged at byte"):
        payloads(path)


def test_another_layout_or_format_is_refused_with_both_numbers(path: Path, writer: RecordingWriter) -> None:
    writer.close()
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    with pytest.raises(RecordingError, match="format 9, this tokring reads format 1"):
        Recording(path)
    data[8], data[16] = 1, data[16] ^ 1
    path.write_bytes(data)
    with pytest.raises(RecordingError, match="the layout [0-9a-f]{16}, this tokring's rings [0-9a-f]{16}"):
        Recording(path)


def test_a_recording_without_a_ready_engine_cannot_be_played(path: Path, writer: RecordingWriter) -> None:
    writer.close()
    with pytest.raises(RecordingError, match="no engine was ready"):
        Recording(path).ready_record()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"--record .*/missing/file: No such file or directory"):
        RecordingWriter(tmp_path / "missing" / "file", {}, max_bytes=1 << 20)


def test_frames_of_a_recording_are_bytes_as_they_stood_in_the_ring(path: Path, writer: RecordingWriter) -> None:
    writer.append(EntryKind.CANCEL, bytes(8))
    writer.append(EntryKind.FRAME, bytes(range(64)), time_ns=5)
    writer.close()
    [frame] = Recording(path).frames()
    assert frame.time_ns == 5
    assert np.array_equal(frame.data, np.arange(64, dtype=np.uint8))
