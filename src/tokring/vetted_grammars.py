"""VettedGrammars: grammars that have passed their vetting, in memory that outlives the engine.

The supervisor creates the memory and hands it to one engine after the other: what was accepted once is not vetted again
when an engine has died. Front ends never get it: they could put in what nobody has vetted.
"""

import fcntl
import hashlib
import mmap
import os
import struct
import threading

from tokring.step_rows import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK

NUM_BYTES = 16 << 20  # of address space; memory is used as grammars come
HEADER = struct.Struct("<Q")  # bytes of entries that follow
ENTRY = struct.Struct("<I32s32s")  # bytes of text; digest of text and key; key


class VettedGrammars:
    """Used by one process at a time. Thread-safe."""

    def __init__(self, fd: int = -1) -> None:
        """`fd`: from create(); -1: memory of this process alone."""
        self._memory = mmap.mmap(fd, NUM_BYTES)
        self._lock = threading.Lock()
        self._places: dict[bytes, tuple[int, int]] = {}  # key -> where its text begins and ends
        self._end = HEADER.size
        self._read(min(HEADER.size + HEADER.unpack_from(self._memory)[0], NUM_BYTES))

    def __len__(self) -> int:
        return len(self._places)

    def get(self, kind: int, text: bytes) -> str | None:
        """What add() was given for this constraint."""
        with self._lock:
            place = self._places.get(_key(kind, text))
            return None if place is None else self._memory[slice(*place)].decode()

    def add(self, kind: int, text: bytes, grammar: str) -> None:
        """Remember the vetted form of a constraint. Too many, and all are forgotten: they can be vetted again."""
        key, data = _key(kind, text), grammar.encode()
        with self._lock:
            if key in self._places or HEADER.size + ENTRY.size + len(data) > NUM_BYTES:
                return
            if self._end + ENTRY.size + len(data) > NUM_BYTES:
                self._places.clear()
                self._end = HEADER.size
                HEADER.pack_into(self._memory, 0, 0)
            start = self._end + ENTRY.size
            ENTRY.pack_into(self._memory, self._end, len(data), _digest(key, data), key)
            self._memory[start : start + len(data)] = data
            self._places[key] = (start, start + len(data))
            self._end = start + len(data)
            HEADER.pack_into(self._memory, 0, self._end - HEADER.size)  # last: an engine may die at any instant

    def _read(self, end: int) -> None:
        """Find the entries of the engine before; what it may have spoilt while it died is left out."""
        while self._end + ENTRY.size <= end:
            num_bytes, digest, key = ENTRY.unpack_from(self._memory, self._end)
            start = self._end + ENTRY.size
            if start + num_bytes > end or _digest(key, self._memory[start : start + num_bytes]) != digest:
                return
            self._places[key] = (start, start + num_bytes)
            self._end = start + num_bytes


def create() -> int:
    """The descriptor of an empty table."""
    fd = os.memfd_create("tokring-vetted-grammars", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NUM_BYTES)
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    return fd


def _key(kind: int, text: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<I", kind) + text).digest()


def _digest(key: bytes, data: bytes) -> bytes:
    return hashlib.sha256(key + data).digest()
