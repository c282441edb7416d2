"""A front end that owns one channel of a running engine (--ipc-listen) and keeps to no rule."""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tests.support.fake_channel import FakeChannel
from tokring_ipc import FINISH_DTYPE, FrameType, FrontEndChannel, struct_dtype
from tokring_ipc._core import SEGMENT_CONTROL_OFFSET, field_table

DEADLINE_S = 60.0
CONTROL_OFFSET = {name: offset for struct, name, _, offset, _ in field_table() if struct == "SegmentControl"}


def connect_control(path: Path) -> tuple[socket.socket, list[int]]:
    """The control socket and the doorbells: REQ's write end, OUT's read end. Nothing is attached yet."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(DEADLINE_S)
    control.connect(str(path))
    _, doorbells, _, _ = socket.recv_fds(control, 4096, 4)
    return control, doorbells


class HostileFrontEnd:
    """Attached like any front end; `memory` is its segment, writable without asking."""

    def __init__(self, path: Path, **sizes: Any) -> None:
        self.control, doorbells = connect_control(path)
        self.req_write_fd, self.out_read_fd = doorbells
        self.channel = FrontEndChannel.connect(
            self.control, self.req_write_fd, self.out_read_fd, num_stream_slots=64, timeout_s=DEADLINE_S, **sizes
        )
        self.control.setblocking(False)
        fd = self.channel.segment_fd
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
        header = np.frombuffer(self.memory[: struct_dtype("SegmentHeader").itemsize], struct_dtype("SegmentHeader"))[0]
        self.req_offset, self.req_bytes = int(header["req_offset"]), int(header["req_bytes"])
        self.cancel_offset = int(header["cancel_offset"])
        self._generation = 0

    def set_word(self, name: str, value: int) -> None:
        offset = SEGMENT_CONTROL_OFFSET + CONTROL_OFFSET[name]
        self.memory[offset : offset + 8] = value.to_bytes(8, "little")

    def ring(self) -> None:
        os.write(self.req_write_fd, b"r")

    def submit(self, ids: Any, *, extensions: bytes = b"", **fields: Any) -> bool:
        """A request as any front end sends it, but for `fields`; False if the ring is full."""
        fake = FakeChannel()
        fake.submit(ids)
        frame = fake.poll_request()
        assert frame is not None
        self._generation += 1
        record = np.array([frame.record])
        record["stream_slot"], record["slot_generation"] = self._generation % 64, self._generation
        for name, value in fields.items():
            record[name] = value
        return self.channel.submit(record, np.array(ids, np.int32), extensions)

    def finishes(self) -> npt.NDArray[Any]:
        """The next finish rows; raises AssertionError if the engine closes the channel instead."""
        rows = self.next_finish()
        assert rows is not None, "the engine has closed the channel"
        return rows

    def next_finish(self) -> npt.NDArray[Any] | None:
        """The next finish rows, FINISH_DTYPE; None: the engine has closed the channel. Raises TimeoutError."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            is_closed = self.is_closed()  # looked at first: what was sent before is still read
            frame = self.channel.poll()
            if frame is None:
                self.channel.release()
                if is_closed:
                    return None
                if self.channel.arm():
                    select.select([self.out_read_fd, self.control], [], [], 0.25)
                    self.channel.drain_doorbell()
            elif frame.type == FrameType.STEP and frame.finish is not None and len(frame.finish):
                rows = np.array(frame.finish, FINISH_DTYPE)
                del frame
                self.channel.release()
                return rows
        raise TimeoutError("no finish row")

    def is_closed(self) -> bool:
        """Whether the engine has closed this channel; what it sent before is skipped."""
        try:
            while self.control.recv(65536):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        self.channel.close()
        self.memory.close()
        self.control.close()
        for fd in (self.req_write_fd, self.out_read_fd):
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
