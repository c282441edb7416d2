"""SpecialDraw: what the samples of a step ask for beyond DrawColumns, for a runner that draws by all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokring.engine.request import Request

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Masks = NDArray[np.uint32]  # [k, words] bit t % 32 of word t // 32 allows token t


@dataclass(slots=True)
class RuledSamples:
    """Samples whose logits rules change: Request.rules."""

    samples: Int32  # [k] index among the step's samples
    requests: tuple[Request, ...]  # [k] the same tuple as long as nobody joins or leaves
    num_tokens: Int32  # [k] so far
    tokens_of: Callable[
        [int], Int32
    ]  # of entry i, so far; the last one is -1 - j where it is sample j of the step before


class LogprobsWanted(NamedTuple):
    """Logprobs by the logits as the model gave them, of n tokens."""

    rows: Int32  # [n] index in the batch's logits_index
    token_ids: Int32  # [n] whose; -1: the one that is drawn for sample rows[i]
    width: int  # how many of the likeliest with each


class FoundLogprobs(NamedTuple):
    """The answer to LogprobsWanted; NaN, rank 0 and ids -1 where logits are not finite or nothing was drawn."""

    logprob: Float32  # [n]
    rank: Int32  # [n]
    top_id: Int32  # [n, width]
    top_logprob: Float32  # [n, width]


class NamedIds(NamedTuple):
    """Ids whose logprobs a request wants instead of those of the likeliest."""

    entry: int  # the sample's among LogprobsWanted
    first: int  # entry of the first of these ids
    ids: Int32


class PromptPart(NamedTuple):
    """Prompt logprobs of one request."""

    row: int
    positions: Int32
    num_wanted: int  # alternatives of each


@dataclass(slots=True)
class SpecialDraw:
    """Valid as long as its batch, but for what the engine notes for itself."""

    ruled: RuledSamples | None = None
    masked: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))  # [k] samples with a grammar
    masks: Callable[[], Masks] | None = None  # of these; waits for them, so to be called once the model is launched
    logprobs: LogprobsWanted | None = None
    # The engine's own: what the entries of `logprobs` are, in this order
    samples: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))  # an entry each
    named_ids: list[NamedIds] = field(default_factory=list)
    prompts: list[PromptPart] = field(default_factory=list)
    first_prompt_entry: int = 0
