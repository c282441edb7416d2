"""One stream of log lines from several processes, each line with its process's name and pid in front."""

import os
import queue
import threading
from collections import deque
from typing import Literal

from tokring.launch.json_log import as_json_line

MAX_LINE_BYTES = 32 * 1024  # a longer line is cut into pieces
MAX_QUEUED_CHUNKS = 4096
NUM_TAIL_LINES = 20
READ_BYTES = 64 * 1024
MAX_READS = 16  # a child that floods its log must not starve the others


class LogSink:
    """Writes to a descriptor from a thread of its own, so that a full or stuck log never holds up the supervisor.

    What does not fit into the bounded queue, or fails to be written, is dropped and counted; the next successful write
    says how much.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._chunks: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED_CHUNKS)
        self.dropped_lines = 0
        self._reported_lines = 0  # of the dropped ones; by the thread only
        self._counting = threading.Lock()  # both threads drop
        self._thread = threading.Thread(target=self._write_chunks, name="log sink", daemon=True)
        self._thread.start()

    def write(self, text: bytes) -> None:
        """Queues whole lines (or a progress bar's redraw)."""
        try:
            self._chunks.put_nowait(text)
        except queue.Full:
            self._drop(text)

    def close(self, timeout_s: float) -> None:
        """Writes what is queued, as long as that makes progress within the time."""
        try:
            self._chunks.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _drop(self, text: bytes) -> None:
        with self._counting:
            self.dropped_lines += text.count(b"\n")

    def _write_chunks(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            dropped = self.dropped_lines  # while this chunk waits for the log, more may be
            new = dropped - self._reported_lines
            report = b"[%d log lines dropped: the log was full]\n" % new if new else b""
            if self._write_all(report + chunk):
                self._reported_lines = dropped
            else:
                self._drop(chunk)

    def _write_all(self, data: bytes) -> bool:
        """False if the log is closed, or the disk behind it is full."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError:
                return False
        return True


class LineReader:
    """Cuts what a child writes into a pipe into tagged lines; keeps the last ones for an error message."""

    def __init__(self, fd: int, tag: str, log_format: Literal["text", "json"] = "text") -> None:
        self.fd = fd
        self._prefix = f"[{tag}] ".encode()
        self._tag = tag
        self._is_json = log_format == "json"
        self._partial = b""
        self.tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        os.set_blocking(fd, False)

    def read_lines(self) -> tuple[bytes, bool]:
        """(tagged whole lines that have arrived, whether the pipe's other end is closed)."""
        pieces = [self._partial]
        closed = False
        for _ in range(MAX_READS):
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                closed = True
                break
            pieces.append(data)
        lines = b"".join(pieces).split(b"\n")
        self._partial = lines.pop()
        if self._partial and (closed or len(self._partial) > MAX_LINE_BYTES):
            lines.append(self._partial)
            self._partial = b""
        self.tail.extend(line.decode(errors="replace") for line in lines[-NUM_TAIL_LINES:])
        return b"".join(self._tagged(line) + b"\n" for line in lines), closed

    def _tagged(self, line: bytes) -> bytes:
        return as_json_line(self._tag, line) if self._is_json else self._prefix + line
