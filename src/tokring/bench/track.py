"""WriterTrack and ReaderTrack: the clock of a run, apart from what is clocked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tokring.bench import _native
from tokring.bench.board import Board, Word, Words
from tokring.bench.case import Regime
from tokring.bench.usage import Usage

_now = time.monotonic_ns


class WriterTrack:
    """Stamps a step when its data is at hand as arrays (or objects), before anything is encoded."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.waited_ns = 0  # CPU that pacing and waiting for acknowledgements took: not the transport's
        self._sent = memoryview(board.sent.data)

    def begin(self, step: int, regime: Regime) -> None:
        if regime.sleep_ns:
            self.waited_ns += _native.sleep_for(regime.sleep_ns)
        self._sent[step] = _now()

    def end(self, step: int, regime: Regime) -> None:
        if not regime.closed:
            return
        self.waited_ns += _native.yield_until(self.board.acknowledged, step + 1)
        if regime.settle_ns:
            self.waited_ns += _native.yield_for(regime.settle_ns)


class ReaderTrack:
    """Stamps a step when its delivered form is complete, then acknowledges it."""

    def __init__(self, board: Board, warm_up: int, verify: Callable[[Any], None]) -> None:
        self.board = board
        self.measured: dict[str, int] = {}
        self._delivered = memoryview(board.delivered.data)
        self._warm_up = warm_up
        self._verify = verify
        self._count = 0
        self._start: Usage | None = None

    @property
    def finished(self) -> bool:
        return self._count == self.board.num_steps

    def ready(self) -> None:
        _native.acknowledge(self.board.word(Word.READER_READY), 1)

    def deliver(self, delivered: Any) -> None:
        step = self._count
        self._delivered[step] = _now()
        if step == 0:
            self._verify(delivered)
        self._count = step = step + 1
        if step == self._warm_up or step == self.board.num_steps:
            self.mark()
        _native.acknowledge(self.board.acknowledged, step)

    def read_natively(self, run: Callable[[Words, Words, int, int], Any]) -> None:
        """`run(delivered, acknowledged, first, last)` stamps and acknowledges by itself, and sums what it read."""
        board, warm_up = self.board, self._warm_up
        self._verify(run(board.delivered, board.acknowledged, 0, 1))
        run(board.delivered, board.acknowledged, 1, warm_up)
        self.mark()
        run(board.delivered, board.acknowledged, warm_up, board.num_steps)
        self.mark()

    def mark(self) -> None:
        """Measuring begins or ends here."""
        counting = self.board.word(Word.READER_MEASURES)
        if self._start is None:
            self._start = Usage.now()
            counting[0] = 1
        else:
            counting[0] = 0
            self.measured = Usage.now().since(self._start)
