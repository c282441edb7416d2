"""Grammar: what one request may write, and how far it has come. GrammarTokenizer: the vocabulary that grammars need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tokring.engine.grammar_text import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Per step, so that no mask takes much longer than a step; per lexer, so that no grammar takes much memory.
_LIMITS = {
    "step_max_items": 10_000,
    "step_lexer_fuel": 100_000,
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# CPU time that a grammar may cost, on average; far above what honest ones take (10 to 100 us a token).
_FREE_NS = 300_000_000
_NS_PER_TOKEN = 5_000_000
# More of one call does not count: on a shared machine it is time that others have taken of this virtual processor.
_MOST_NS_PER_CALL = 100_000_000


class GrammarTokenizer:
    """Bytes of each token, as a trie. Building it takes about 0.3 s for 50,000 tokens, the interpreter lock held."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Raise GrammarError if the tokenizer is of a kind that llguidance does not know."""
        from llguidance import LLTokenizer

        self.tokenizer_json = tokenizer_json
        self.eos_ids = list(eos_ids)
        try:
            # Without EOS ids of its own it would guess them; ours are set per request.
            self.native = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=self.eos_ids or None)
        except ValueError as error:
            raise GrammarError(f"this model's tokenizer can't be used for grammars: {error}") from error
        self.vocab_size = int(self.native.vocab_size)
        self.mask_words = (self.vocab_size + 31) // 32
        self.native_eos_ids = np.array(self.native.eos_tokens, np.int64)

    def compile(self, grammar: str) -> LLMatcher:
        """Compile a grammar in llguidance's language (without the interpreter lock); raises GrammarError."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
        matcher = LLMatcher(self.native, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        return matcher


class Grammar:
    """One request's place in its grammar. Kept while the request is preempted: its output stays."""

    def __init__(self, tokenizer: GrammarTokenizer, matcher: LLMatcher, eos_ids: Sequence[int]) -> None:
        """`eos_ids`: those that may end the output where the grammar is satisfied."""
        self._matcher = matcher
        self.mask_words = tokenizer.mask_words
        self._no_eos = tokenizer.native_eos_ids
        self._eos_ids = np.array(eos_ids, np.int64)
        self._spent_ns = 0
        self._num_tokens = 0

    def fill_mask(self, mask: NDArray[np.uint32]) -> None:
        """Write which tokens may come next: bit t % 32 of word t // 32; mask uint32[mask_words], contiguous."""
        started_ns = time.thread_time_ns()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _clear_bits(mask, self._no_eos)
        if self.is_accepting:
            _set_bits(mask, self._eos_ids)
        self._spend(started_ns)

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Go on over tokens that were written; False if the grammar does not allow them."""
        started_ns = time.thread_time_ns()
        accepted = self._matcher.consume_tokens(list(token_ids))
        self._num_tokens += len(token_ids)
        self._spend(started_ns)
        return accepted

    def _spend(self, started_ns: int) -> None:
        self._spent_ns += min(time.thread_time_ns() - started_ns, _MOST_NS_PER_CALL)

    @property
    def failure(self) -> str | None:
        """Why it can't go on: a limit of the library, or of the time it takes of every step; else None."""
        if self._matcher.is_error():
            return first_line(self._matcher.get_error())
        if self._spent_ns > _FREE_NS + _NS_PER_TOKEN * self._num_tokens:
            return f"too slow: {self._spent_ns / 1e6:.0f} ms for {self._num_tokens} tokens"
        return None

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far is complete (it may be continued all the same)."""
        return bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        """Whether the output so far is complete and nothing can follow."""
        return self.is_accepting and bool(self._matcher.is_stopped()) and not self._matcher.is_error()


def first_line(error: str) -> str:
    """The line that says something; the rest is a drawing of the place, or a backtrace."""
    return (error.strip().splitlines() or ["unknown error"])[0][:300]


def _set_bits(mask: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
    for token_id in ids.tolist():
        mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _clear_bits(mask: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
    for token_id in ids.tolist():
        mask[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
