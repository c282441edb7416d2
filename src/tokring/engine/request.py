"""Request: the part of a request's state that no step touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokring.engine.grammar import Grammar
from tokring_ipc import ExtensionKind

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


class RecordValues(NamedTuple):
    """A request record as Python numbers: REQUEST_DTYPE's fields in its order (a test compares them)."""

    stream_slot: int
    slot_generation: int
    parent_slot: int
    choice_index: int
    num_ids: int
    num_prior_output: int
    extension_bytes: int
    flags: int
    max_tokens: int
    min_tokens: int
    num_logprobs: int
    num_prompt_logprobs: int
    temperature: float
    top_p: float
    min_p: float
    top_k: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    priority: int
    seed: int
    arrival_ns: int
    deadline_ns: int
    num_stop_ids: int
    eos_mask: int
    stop_ids: bytes  # all 8; the first num_stop_ids count


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One choice of one completion, from intake to its finish row."""

    # this request, fixed at intake
    channel: int
    stream_slot: int
    slot_generation: int
    record: RecordValues
    order: int  # scheduling key: smaller goes first, larger is preempted first
    num_prompt: int
    max_total: int  # prompt plus output tokens at which it ends by LENGTH
    stop_ids: Sequence[int]  # inline ones, at most 8
    more_stop_ids: frozenset[int] = frozenset()
    num_prompt_logprobs: int
    logprob_ids: NDArray[np.int32] | None = None  # whose logprobs are sent instead of those of the most likely ids
    rules: LogitRules | None = None
    root: bytes  # where its chain of block hashes starts
    use_prefix_cache: bool
    grammar_text: GrammarText | None = None  # constrains the output
    parent_slot: int  # stream slot of the sibling that computes the shared prompt, or -1
    num_logprobs: int = field(init=False)  # -1: none; 0: only of the sampled token
    needs_tokens: bool = field(init=False)  # no step can be prepared before its tokens so far are known
    is_special: bool = field(init=False)  # sampling or finishing takes more than columns can say

    # this request, changing
    token_ids: NDArray[np.int32]  # prompt and output so far; stale while running, see RequestColumns
    chain: bytes = b""  # digests of its full blocks, as far as known
    grammar: Grammar | None = None  # once compiled
    num_prompt_logprobs_sent: int = 0  # prompt tokens, from the second on, whose logprobs are out
    num_inserted: int = 0  # blocks of the chain that the prefix cache was told since it was last admitted
    num_cached: int = -1  # prompt tokens found in the prefix cache at first admission; -1 before
    num_preemptions: int = 0
    num_drafted: int = 0  # stale while running, see RequestColumns
    num_accepted: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    row: int = -1  # row in the columns while running, else -1
    place: int = -1  # place in the waiting queue while waiting, else -1

    def __post_init__(self) -> None:
        self.num_logprobs = self.record.num_logprobs if self.logprob_ids is None else len(self.logprob_ids)
        self.needs_tokens = (
            self.grammar_text is not None
            or self.num_prompt_logprobs >= 0
            or self.max_total <= self.num_prompt
            or (self.rules is not None and self.rules.has_long_words)
        )
        self.is_special = (
            self.needs_tokens or self.rules is not None or bool(self.more_stop_ids) or self.logprob_ids is not None
        )

    @property
    def eos_ids(self) -> list[int]:
        """Inline stop ids that are EOS: they may end the output where its grammar allows it."""
        return [stop_id for bit, stop_id in enumerate(self.stop_ids) if self.record.eos_mask >> bit & 1]

    @property
    def awaits_grammar(self) -> bool:
        """Whether it can't run yet."""
        return self.grammar_text is not None and self.grammar is None

    @property
    def nothing_to_do(self) -> bool:
        """Whether it ends before any token is computed: no output wanted, or the prior output is all there may be."""
        return len(self.token_ids) >= self.max_total and (self.num_prompt_logprobs < 0 or self.num_prompt == 1)
