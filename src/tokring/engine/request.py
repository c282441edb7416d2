"""Request: the part of a request's state that no step touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokring.engine.grammar import Grammar
from tokring_ipc import REQUEST_DTYPE, ExtensionKind

LONGEST_LOOKED_UP = 65  # tokens of a bad word: all but the last one are compared with the latest tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRules:
    """What changes the logits of one request before sampling; requests without any carry None instead."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: NDArray[np.int32] | None = None
    bias: NDArray[np.float32] | None = None
    allowed_ids: NDArray[np.int32] | None = None
    bad_words: Sequence[NDArray[np.int32]] = ()
    min_total: int = 0  # no stop id may be sampled before the sequence is this long
    stop_ids: NDArray[np.int32] | None = None  # all of them, for min_total

    @property
    def has_long_words(self) -> bool:
        """Whether a bad word is longer than what runners that draw by rules look up."""
        return any(len(word) > LONGEST_LOOKED_UP for word in self.bad_words)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far matter."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class GrammarText(NamedTuple):
    """A GRAMMAR_* extension as it came."""

    kind: ExtensionKind
    text: bytes


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one completion, from intake to its finish row."""

    # this request, fixed at intake
    channel: int
    record: bytes  # REQUEST_DTYPE, as RequestLimits.check() returns it
    stream_slot: int
    slot_generation: int
    parent_slot: int  # stream slot of the sibling that computes the shared prompt, or -1
    deadline_ns: int
    order: int  # scheduling key: smaller goes first, larger is preempted first
    num_prompt: int
    max_total: int  # prompt plus output tokens at which it ends by LENGTH
    num_logprobs: int  # -1: none; 0: only of the sampled token
    num_prompt_logprobs: int
    stop_ids: Sequence[int]  # inline ones, at most 8
    root: bytes  # where its chain of block hashes starts
    use_prefix_cache: bool
    token_ids: NDArray[np.int32]  # prompt and output so far, replaced when it is preempted; see RequestColumns
    chain: bytes  # digests of its full blocks, as far as known; grows
    needs_tokens: bool  # no step can be prepared before its tokens so far are known
    is_special: bool  # sampling or finishing takes more than columns can say
    more_stop_ids: frozenset[int] = frozenset()
    logprob_ids: NDArray[np.int32] | None = None  # whose logprobs are sent instead of those of the most likely ids
    rules: LogitRules | None = None
    grammar_text: GrammarText | None = None  # constrains the output

    # this request, changing
    grammar: Grammar | None = field(default=None, init=False)  # once compiled
    num_prompt_logprobs_sent: int = field(default=0, init=False)  # prompt tokens, from the second on, that are out
    num_inserted: int = field(default=0, init=False)  # blocks that the prefix cache was told since its last admission
    num_cached: int = field(default=-1, init=False)  # prompt tokens in the cache at first admission; -1 before
    num_preemptions: int = field(default=0, init=False)
    num_drafted: int = field(default=0, init=False)  # stale while running, see RequestColumns
    num_accepted: int = field(default=0, init=False)
    scheduled_ns: int = field(default=0, init=False)
    first_token_ns: int = field(default=0, init=False)
    row: int = field(default=-1, init=False)  # row in the columns while running, else -1
    place: int = field(default=-1, init=False)  # place in the waiting queue while waiting, else -1

    @property
    def eos_ids(self) -> list[int]:
        """Inline stop ids that are EOS: they may end the output where its grammar allows it."""
        eos_mask = int(np.frombuffer(self.record, REQUEST_DTYPE)["eos_mask"][0])
        return [stop_id for bit, stop_id in enumerate(self.stop_ids) if eos_mask >> bit & 1]

    @property
    def awaits_grammar(self) -> bool:
        """Whether it can't run yet."""
        return self.grammar_text is not None and self.grammar is None

    @property
    def nothing_to_do(self) -> bool:
        """Whether it ends before any token is computed: no output wanted, or the prior output is all there may be."""
        return len(self.token_ids) >= self.max_total and (self.num_prompt_logprobs < 0 or self.num_prompt == 1)


def record_offsets(*fields: str) -> list[int]:
    """Where these fields of a request's record are, in bytes; -1 for names that are none."""
    known = REQUEST_DTYPE.fields
    assert known is not None
    return [known[name][1] if name in known else -1 for name in fields]
