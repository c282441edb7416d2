"""StepRows: what the engine computes in the step that is running, where it can be read after the engine has died."""

import fcntl
import mmap
import os
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

COLUMNS = ("front_end", "stream_slot", "slot_generation", "num_scheduled", "num_cached")
HEADER = struct.Struct("<II")  # rows; whether a step was running
HEADER_BYTES = 64
F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1, 2, 4  # fcntl(2); not in every Python's fcntl


class RequestAtDeath(NamedTuple):
    """A request that the engine was running when it died."""

    stream_slot: int
    slot_generation: int
    was_in_step: bool  # tokens of it were being computed
    num_cached: int  # prompt tokens found in the prefix cache at its first admission; -1: unknown


class StepRows:
    """The engine's side: one table of int32 columns in a sealed memfd, rewritten before each step.

    Nothing is atomic: it is read only when its writer is dead.
    """

    def __init__(self, max_rows: int, fd: int = -1) -> None:
        """`fd`: from create() with the same max_rows or more; -1: memory of this process, for engines without one."""
        size = num_bytes(max_rows) if fd < 0 else os.fstat(fd).st_size  # says how many rows the table has
        self._memory = mmap.mmap(fd, size)
        self._columns = np.frombuffer(self._memory, np.int32, offset=HEADER_BYTES).reshape(len(COLUMNS), -1)

    def begin(self, columns: npt.NDArray[np.int32], num_rows: int) -> None:
        """A step begins. `columns` int32[5, >= num_rows], as COLUMNS names them."""
        HEADER.pack_into(self._memory, 0, 0, 0)
        self._columns[:, :num_rows] = columns[:, :num_rows]
        HEADER.pack_into(self._memory, 0, num_rows, 1)

    def end(self) -> None:
        """The step's tokens are published."""
        self._memory[4] = 0


def num_bytes(max_rows: int) -> int:
    return HEADER_BYTES + 4 * len(COLUMNS) * max_rows


def create(max_rows: int) -> int:
    """The descriptor of an empty table. Sealed: no process can make another's reads fail."""
    fd = os.memfd_create("tokring-step-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes(max_rows))
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    return fd


def read_at_death(fd: int, front_end: int) -> list[RequestAtDeath]:
    """One front end's requests in the table of an engine that has ended."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    num_rows, in_step = HEADER.unpack_from(data)
    rows = np.frombuffer(data, np.int32, offset=HEADER_BYTES).reshape(len(COLUMNS), -1)[:, :num_rows].T
    return [
        RequestAtDeath(slot, generation & 0xFFFFFFFF, bool(in_step and num_scheduled), num_cached)
        for owner, slot, generation, num_scheduled, num_cached in rows.tolist()
        if owner == front_end
    ]
