"""Both ends of a real channel in one process, and what tests do to its segment behind the ends' backs."""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
from types import TracebackType
from typing import Any, Self

import numpy as np

from tokring_ipc import REQUEST_DTYPE, EngineChannel, FrontEndChannel
from tokring_ipc._core import SEGMENT_CONTROL_OFFSET, field_table, struct_dtype

CONTROL_OFFSET = {name: offset for struct, name, _, offset, _ in field_table() if struct == "SegmentControl"}


class ChannelPair:
    """front_end and engine, joined by real memfd, socketpair and pipes; closes everything."""

    def __init__(self, *, accept: dict[str, Any] | None = None, **connect: Any) -> None:
        self.frontend_control, self.engine_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.req_read_fd, self.req_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.out_read_fd, self.out_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._memory: mmap.mmap | None = None
        options = {"req_bytes": 1 << 16, "out_bytes": 1 << 16, "num_stream_slots": 64, "debug": True} | connect
        accepted: list[EngineChannel] = []

        def serve() -> None:
            accepted.append(
                EngineChannel.accept(
                    self.engine_control, self.req_read_fd, self.out_write_fd, timeout_s=10, **(accept or {})
                )
            )

        thread = threading.Thread(target=serve)
        thread.start()
        self.front_end = FrontEndChannel.connect(
            self.frontend_control, self.req_write_fd, self.out_read_fd, timeout_s=10, **options
        )
        thread.join()
        self.engine = accepted[0]

    def memory(self) -> mmap.mmap:
        """The segment, mapped a third time: the hand of a hostile peer."""
        if self._memory is None:
            fd = self.engine.segment_fd
            self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
        return self._memory

    @property
    def header(self) -> Any:
        """A copy of the SegmentHeader."""
        return np.frombuffer(self.memory(), struct_dtype("SegmentHeader"), count=1)[0].copy()

    def word(self, name: str) -> int:
        """A control word, as it stands in the segment."""
        offset = SEGMENT_CONTROL_OFFSET + CONTROL_OFFSET[name]
        return int.from_bytes(self.memory()[offset : offset + 8], "little")

    def set_word(self, name: str, value: int) -> None:
        offset = SEGMENT_CONTROL_OFFSET + CONTROL_OFFSET[name]
        self.memory()[offset : offset + 8] = value.to_bytes(8, "little")

    def poke(self, ring: str, position: int, data: bytes) -> None:
        """Overwrites ring bytes at an absolute position ("req" or "out")."""
        start = int(self.header[f"{ring}_offset"]) + position % int(self.header[f"{ring}_bytes"])
        self.memory()[start : start + len(data)] = data

    def close_ends(self) -> None:
        self.front_end.close()
        self.engine.close()

    def close(self) -> None:
        self.close_ends()
        if self._memory is not None:
            self._memory.close()
        self.frontend_control.close()
        self.engine_control.close()
        for fd in (self.req_read_fd, self.req_write_fd, self.out_read_fd, self.out_write_fd):
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def request(stream_slot: int = 0, slot_generation: int = 1, **fields: Any) -> np.ndarray[Any, np.dtype[np.void]]:
    record = np.zeros((), REQUEST_DTYPE)
    record["stream_slot"] = stream_slot
    record["slot_generation"] = slot_generation
    for name, value in fields.items():
        record[name] = value
    return record


def u32(*values: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


def i32(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def write_tokens(engine: EngineChannel, *tokens: int) -> bool:
    """One step of these tokens for slots 0, 1, ... in generation 1; published, doorbell paid."""
    written = engine.write_step(
        np.arange(len(tokens), dtype=np.uint32), np.ones(len(tokens), np.uint32), np.array(tokens, np.int32)
    )
    engine.publish()
    engine.ring()
    return written


def rings(fd: int) -> int:
    """Bytes in a doorbell pipe, taken out."""
    total = 0
    while select.select([fd], [], [], 0)[0]:
        total += len(os.read(fd, 4096))
    return total
