"""RecordingWriter: entries to a bounded, rotating file, by a thread of its own. Whoever records never waits."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tokring.recording.file_format import (
    FORMAT_VERSION,
    GAP,
    HEADER,
    MAGIC,
    EntryKind,
    RecordingError,
    encode_entry,
    padding,
)
from tokring_ipc import LAYOUT_HASH

logger = logging.getLogger(__name__)

BATCH_S = 0.05  # entries are collected for so long, then written at once
MAX_BUFFERED_BYTES = 32 << 20
CLOSE_TIMEOUT_S = 5.0


class RecordingWriter:
    """append() is for one thread. What the disk does not take in time is dropped, counted, and noted in the file.

    The file and the one before it (FILE.1) hold at most max_bytes together. Entries in `preamble` are repeated at the
    start of every file.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        *,
        max_bytes: int,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        """Raises RecordingError if the file cannot be written."""
        # Whole recording.
        self._path = path
        self._metadata = json.dumps(dict(metadata)).encode()
        self._max_file_bytes = max_bytes // 2
        self._max_buffered_bytes = max_buffered_bytes
        self._has_failed = False
        self._is_closing = False
        # Between the two threads: each word is written by one of them.
        self._entries: deque[bytes] = deque()
        self._appended_bytes = 0
        self._taken_bytes = 0
        self._wake = threading.Event()
        self.preamble: list[bytes] = []
        self.num_dropped = 0
        self._num_dropped_in_file = 0
        # This file.
        self._file_bytes = 0
        self._file = self._open()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def append(self, kind: EntryKind, payload: bytes, time_ns: int | None = None) -> None:
        """Takes one entry, or drops it if the writer is too far behind. Never blocks."""
        entry = encode_entry(kind, time.monotonic_ns() if time_ns is None else time_ns, payload)
        if self._appended_bytes - self._taken_bytes + len(entry) > self._max_buffered_bytes or self._has_failed:
            self.num_dropped += 1
            return
        if self.num_dropped != self._num_dropped_in_file:
            missing = self.num_dropped - self._num_dropped_in_file
            self._num_dropped_in_file = self.num_dropped
            self._put(encode_entry(EntryKind.GAP, time.monotonic_ns(), GAP.pack(missing)))
        self._put(entry)

    def _put(self, entry: bytes) -> None:
        self._appended_bytes += len(entry)
        self._entries.append(entry)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Writes what is left, within CLOSE_TIMEOUT_S."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self.num_dropped:
            logger.warning("recording %s lacks %d entries: the disk was too slow or full", self._path, self.num_dropped)

    # ---- the thread ----

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait()
            if not self._is_closing:
                time.sleep(BATCH_S)
            self._wake.clear()
            self._write_out()
        self._write_out()
        self._file.close()

    def _write_out(self) -> None:
        try:
            while self._entries:
                self._write_batch()
        except OSError as error:
            if not self._has_failed:
                logger.error("recording %s ends: %s", self._path, error)
            self._has_failed = True
            self._entries.clear()

    def _write_batch(self) -> None:
        """Up to the end of the file's share."""
        batch: list[bytes] = []
        num_bytes = 0
        while self._entries and (not batch or self._file_bytes + num_bytes < self._max_file_bytes):
            batch.append(self._entries.popleft())
            num_bytes += len(batch[-1])
        self._file.write(b"".join(batch))
        self._file_bytes += num_bytes
        self._taken_bytes += num_bytes
        if self._file_bytes >= self._max_file_bytes:
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = self._open()

    def _open(self) -> BinaryIO:
        header = HEADER.pack(
            MAGIC, FORMAT_VERSION, len(self._metadata), LAYOUT_HASH, time.monotonic_ns(), time.time_ns()
        )
        start = b"".join((header, self._metadata, padding(len(self._metadata)), *self.preamble))
        try:
            # Prompts and answers are nobody else's business.
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            file = open(fd, "wb", buffering=0)
            file.write(start)
        except OSError as error:
            raise RecordingError(f"--record {self._path}: {error.strerror}") from None
        self._file_bytes = len(start)
        return file
