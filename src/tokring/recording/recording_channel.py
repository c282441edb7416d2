"""RecordingChannel: a front end's channel that notes what passes through it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.recording.file_format import CANCEL, EntryKind, encode_entry
from tokring.recording.recording_writer import RecordingWriter
from tokring_ipc import FrameType, now_ns


class RecordingChannel:
    """The part of tokring_ipc.FrontEndChannel that a front end uses.

    With `redact`, prompts leave no trace but their length: their ids become 0, extensions and prompt logprobs are left
    out. Answers stay.
    """

    def __init__(self, channel: Any, writer: RecordingWriter, *, redact: bool = False) -> None:
        self._channel = channel
        self._writer = writer
        self._redact = redact
        writer.append(EntryKind.CONNECTED, b"")

    @property
    def control(self) -> Any:
        return self._channel.control

    @property
    def out_doorbell_fd(self) -> int:
        fd: int = self._channel.out_doorbell_fd
        return fd

    def submit(self, record: npt.NDArray[Any], ids: npt.NDArray[np.int32], extensions: bytes = b"") -> bool:
        time_ns = now_ns()  # before: the engine may have answered by the time submit() returns
        if not self._channel.submit(record, ids, extensions):
            return False
        self._writer.append(EntryKind.REQUEST, self._request(record, ids, extensions), time_ns)
        return True

    def _request(self, record: npt.NDArray[Any], ids: npt.NDArray[np.int32], extensions: bytes) -> bytes:
        copy = np.array(record).reshape(-1)[:1]
        if self._redact:
            ids = ids.copy()
            ids[: len(ids) - int(copy["num_prior_output"][0])] = 0
            extensions = b""
        copy["num_ids"], copy["extension_bytes"] = len(ids), len(extensions)
        return copy.tobytes() + ids.tobytes() + bytes(extensions)

    def poll(self) -> Any:
        frame = self._channel.poll()
        if frame is not None and not (self._redact and frame.type == FrameType.PROMPT_LOGPROBS):
            data = frame.data.tobytes()
            if frame.type == FrameType.READY:
                self._writer.preamble = [encode_entry(EntryKind.FRAME, now_ns(), data)]
            self._writer.append(EntryKind.FRAME, data)
        return frame

    def cancel(self, stream_slot: int, slot_generation: int) -> None:
        self._channel.cancel(stream_slot, slot_generation)
        self._writer.append(EntryKind.CANCEL, CANCEL.pack(stream_slot, slot_generation))

    def release(self) -> None:
        self._channel.release()

    def arm(self) -> bool:
        armed: bool = self._channel.arm()
        return armed

    def drain_doorbell(self) -> None:
        self._channel.drain_doorbell()

    def count_in(self, page: Any, peer: int) -> None:
        self._channel.count_in(page, peer)

    def close(self) -> None:
        self._channel.close()
