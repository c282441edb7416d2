"""GrammarMasks: one step's constrained rows: masks filled while the model runs, tokens accepted after sampling."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.grammar import Grammar
from tokring.engine.request import Request
from tokring.engine.special_draw import Masks
from tokring_ipc import ErrorCode, FinishReason

GrammarEnd = tuple[FinishReason, ErrorCode]


class GrammarMasks:
    """begin → (the model runs) → apply → (tokens are sampled) → accept, each once a step. Other rows cost nothing."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._masks = np.zeros((max_rows, 0), np.uint32)
        self._filler: ThreadPoolExecutor | None = None
        # this step
        self._rows: list[tuple[int, Request, Grammar]] = []  # (index among the sampled tokens, whose, its grammar)
        self._filling: Future[None] | None = None

    def begin(self, rows: list[tuple[int, Request, Grammar]]) -> None:
        """Start to fill the masks of these rows; llguidance does it without the interpreter lock."""
        self._rows = rows
        if not rows:
            return
        if self._filler is None:
            self._filler = ThreadPoolExecutor(1, "grammar-masks")
            self._masks = np.zeros((self._max_rows, rows[0][2].mask_words), np.uint32)
        self._filling = self._filler.submit(self._fill)

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Set to -inf what the grammars forbid, in logits float32[m, vocab_size]."""
        if self._filling is not None:
            tokring_kernels.apply_bitmask(logits, self.take(), self.indexes)

    @property
    def indexes(self) -> NDArray[np.int32]:
        """Which of the step's sampled tokens have a mask."""
        return np.array([index for index, _, _ in self._rows], np.int32)

    def take(self) -> Masks:
        """Wait for the masks; for one who applies them himself. Valid until the next begin()."""
        assert self._filling is not None
        self._filling.result()
        self._filling = None
        return self._masks[: len(self._rows)]

    def accept(
        self, token_ids: NDArray[np.int32], finite: NDArray[np.bool_], nothing_left: Callable[[int], bool]
    ) -> dict[int, GrammarEnd]:
        """Tell the grammars what was sampled; return which of the tokens end their request, and how.

        nothing_left(index): whether all of its logits are -inf, asked where no token could be drawn.
        token_ids becomes -1 where a grammar failed before the token: nothing says that it is right.
        """
        ends: dict[int, GrammarEnd] = {}
        for index, request, grammar in self._rows:
            token_id = int(token_ids[index])
            if grammar.failure is not None:
                token_ids[index] = -1
                ends[index] = _FAILED
            elif token_id < 0:
                # Nothing was left to choose: an error, unless the output is complete as it is (and EOS is not wanted).
                if not finite[index] and nothing_left(index):
                    ends[index] = _COMPLETE if grammar.is_accepting else _FAILED
            elif token_id not in request.stop_ids and token_id not in request.more_stop_ids:
                grammar.accept([token_id])
                if grammar.is_complete:
                    ends[index] = _COMPLETE
                elif grammar.failure is not None:
                    ends[index] = _FAILED
        return ends

    def _fill(self) -> None:
        for mask, (_, _, grammar) in zip(self._masks, self._rows, strict=False):
            grammar.fill_mask(mask)


_COMPLETE = (FinishReason.STOP, ErrorCode.NONE)
_FAILED = (FinishReason.ERROR, ErrorCode.GRAMMAR)
