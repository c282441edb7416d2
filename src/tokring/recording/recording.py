"""Recording: a file written by `tokring serve --record`, read entry by entry."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokring.recording.file_format import ENTRY, FORMAT_VERSION, HEADER, MAGIC, EntryKind, RecordingError, padding
from tokring_ipc import FRAME_HEADER_DTYPE, LAYOUT_HASH, READY_DTYPE, FrameType


class Entry(NamedTuple):
    kind: EntryKind
    time_ns: int  # CLOCK_MONOTONIC
    payload: memoryview


class RecordedFrame(NamedTuple):
    """A frame as it stood in the ring, with the time at which the front end took it."""

    time_ns: int
    data: npt.NDArray[np.uint8]


class Recording:
    """A recording, mapped read-only. Its end may be torn: the server that wrote it may have been killed."""

    def __init__(self, path: Path) -> None:
        """Raises RecordingError with one line: no such file, not a recording, another layout."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # mmap refuses an empty file
            raise RecordingError(f"recording {path}: {getattr(error, 'strerror', None) or 'it is empty'}") from None
        self.metadata: Mapping[str, Any] = self._read_header()

    def _read_header(self) -> Mapping[str, Any]:
        if len(self._data) < HEADER.size or self._data[: len(MAGIC)] != MAGIC:
            raise RecordingError(f"recording {self.path}: not written by `tokring serve --record`")
        _, version, num_bytes, layout_hash, _, _ = HEADER.unpack_from(self._data)
        if version != FORMAT_VERSION:
            raise RecordingError(f"recording {self.path}: format {version}, this tokring reads format {FORMAT_VERSION}")
        if layout_hash != LAYOUT_HASH:
            raise RecordingError(
                f"recording {self.path}: its frames have the layout {layout_hash:016x}, this tokring's rings "
                f"{LAYOUT_HASH:016x}: replay it with the version that wrote it"
            )
        self._start = HEADER.size + num_bytes + len(padding(num_bytes))
        try:
            metadata: dict[str, Any] = json.loads(self._data[HEADER.size : HEADER.size + num_bytes])
        except ValueError:
            raise RecordingError(f"recording {self.path}: its header is damaged") from None
        return metadata

    def entries(self) -> Iterator[Entry]:
        """In the order of recording. Raises RecordingError for a damaged entry; a torn last one ends the iteration."""
        view = memoryview(self._data)
        offset = self._start
        while offset + ENTRY.size <= len(view):
            num_bytes, kind, pad, time_ns = ENTRY.unpack_from(view, offset)
            if offset + num_bytes > len(view):
                return
            if num_bytes < ENTRY.size + pad or num_bytes % 8 or kind not in EntryKind._value2member_map_:
                raise RecordingError(f"recording {self.path}: damaged at byte {offset}")
            yield Entry(EntryKind(kind), time_ns, view[offset + ENTRY.size : offset + num_bytes - pad])
            offset += num_bytes

    def frames(self) -> Iterator[RecordedFrame]:
        """The OUT frames alone, for benchmarks."""
        for entry in self.entries():
            if entry.kind is EntryKind.FRAME:
                yield RecordedFrame(entry.time_ns, np.frombuffer(entry.payload, np.uint8))

    def ready_record(self) -> np.void:
        """What the recorded engine said about itself. Raises RecordingError if it is missing."""
        start = FRAME_HEADER_DTYPE.itemsize
        for frame in self.frames():
            if frame.data[:start].view(FRAME_HEADER_DTYPE)[0]["type"] == FrameType.READY:
                record: np.void = frame.data[start : start + READY_DTYPE.itemsize].view(READY_DTYPE)[0]
                return record
        raise RecordingError(f"recording {self.path}: no engine was ready while it was made")


def recorded_frames(path: str | Path) -> Iterator[RecordedFrame]:
    """The OUT frames of a recording, in order."""
    return Recording(Path(path)).frames()
