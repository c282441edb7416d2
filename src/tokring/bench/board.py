"""Board: the words that writer and reader of one run share beside the transport: stamps, acknowledgements, flags."""

from __future__ import annotations

import mmap
import time
from enum import IntEnum

import numpy as np
import numpy.typing as npt

WORDS_APART = 16  # 128 bytes: one writer per cache line pair
PATIENCE_S = 30.0

Words = npt.NDArray[np.uint64]


class Word(IntEnum):
    ACKNOWLEDGED = 0  # steps the reader is done with
    GO = 1  # the parent lets both start
    WRITER_READY = 2
    READER_READY = 3
    WRITER_MEASURES = 4  # nonzero between warm-up and end
    READER_MEASURES = 5
    PUBLISHED = 6  # of the copy loop


class Board:
    """Anonymous shared memory, inherited by fork."""

    def __init__(self, num_steps: int) -> None:
        header = len(Word) * WORDS_APART
        self._memory = mmap.mmap(-1, 8 * (header + 2 * num_steps))
        words = np.frombuffer(self._memory, dtype=np.uint64)
        self._words = words
        self.num_steps = num_steps
        self.sent: Words = words[header : header + num_steps]  # ns, CLOCK_MONOTONIC, by step
        self.delivered: Words = words[header + num_steps :]
        self.acknowledged = self.word(Word.ACKNOWLEDGED)
        words[:] = 0  # touch every page before anything is timed

    def sleep_until(self, flag: Word) -> None:
        """Waits while processes are set up: sleeping, so that the one which is waited for gets the core."""
        word = self.word(flag)
        deadline = time.monotonic() + PATIENCE_S
        while not word[0]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{flag.name} never came")
            time.sleep(0.0002)

    def word(self, which: Word) -> Words:
        """One word as an array of one."""
        start = which * WORDS_APART
        return self._words[start : start + 1]
