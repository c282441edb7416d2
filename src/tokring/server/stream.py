"""Stream: one sequence that the engine generates for a client, bound to a stream slot."""

import asyncio
import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.sampling_params import SamplingParams
from tokring_ipc import RequestFlag


class StreamState(enum.Enum):
    """Life of a stream slot; FREE is the absence of a Stream."""

    SUBMITTED = enum.auto()  # in the request ring, no token seen
    RUNNING = enum.auto()  # a token was seen
    CANCELLING = enum.auto()  # the cancel word is set; the finish row is awaited


@dataclass(frozen=True, slots=True)
class StreamError:
    """Why a stream ended without an answer, as HTTP status and the error object's message and code."""

    status: int
    message: str
    code: str


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt positions [start, start + len(logprob)); top_* are [count, width], missing ids are -1."""

    start: int
    rank: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    top_id: npt.NDArray[np.int32]
    top_logprob: npt.NDArray[np.float32]

    @classmethod
    def copied(cls, start: int, rank: Any, logprob: Any, top_id: Any, top_logprob: Any) -> "PromptLogprobs":
        """Of a frame's views, which die with the next release()."""
        return cls(start, rank.copy(), logprob.copy(), np.array(top_id, ndmin=2), np.array(top_logprob, ndmin=2))


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What was submitted, kept so that another engine can go on: record REQUEST_DTYPE[1], prompt ids int32[n]."""

    record: npt.NDArray[Any]
    prompt_ids: npt.NDArray[np.int32]
    extensions: bytes

    def resumed(self, generation: int, prior_output: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The ids to submit behind the record, which is changed to say so. Limits count all output: they stay."""
        row = self.record[0]
        row["slot_generation"], row["num_prior_output"] = generation, len(prior_output)
        if not len(prior_output):
            return self.prompt_ids
        row["flags"] = int(row["flags"]) | RequestFlag.RESUMED
        row["deadline_ns"] = 0  # for the first token; it is out
        return np.concatenate((self.prompt_ids, prior_output))


@dataclass(slots=True)
class Siblings:
    """The choices of one prompt, counted as they finish."""

    num_unfinished: int
    longest: int = 0

    def finish(self, num_tokens: int) -> int | None:
        """One more has finished; the length of the longest if it was the last."""
        self.num_unfinished -= 1
        self.longest = max(self.longest, num_tokens)
        return None if self.num_unfinished else self.longest


class Stream:
    """State of one generation of one stream slot. Owned by the EngineClient; handlers await and read it."""

    __slots__ = (
        "arrival_ns",
        "changed",
        "choice_index",
        "engine_is_done",
        "error",
        "finished",
        "generation",
        "is_open",
        "is_sent",
        "num_cached_tokens",
        "num_prompt_tokens",
        "num_tokens_when_sent",
        "owner_is_done",
        "params",
        "prompt_logprobs",
        "request",
        "settled",
        "siblings",
        "slot",
        "started",
        "state",
        "strikes",
    )

    def __init__(self, slot: int, generation: int, arrival_ns: int, loop: asyncio.AbstractEventLoop) -> None:
        self.slot = slot
        self.generation = generation
        self.arrival_ns = arrival_ns
        self.num_prompt_tokens = 0
        self.params: SamplingParams | None = None
        self.choice_index = 0
        self.siblings: Siblings | None = None
        self.state = StreamState.SUBMITTED
        self.is_open = False  # in the token path
        self.request: EngineRequest | None = None  # once submitted
        self.is_sent = False  # to the engine that runs now
        self.num_tokens_when_sent = 0  # prior output of the request as that engine has it
        self.strikes = 0  # deaths of engines that were working on it and had not got it any further
        self.num_cached_tokens = -1  # at its first admission, if an engine died after that
        self.settled: asyncio.Future[None] = loop.create_future()  # the text is final, or `error` says why not
        self.started: asyncio.Future[None] | None = None  # set by who wants to know of the first token
        self.finished: asyncio.Future[None] | None = None  # set by who wants to know of the engine's last word
        self.changed: asyncio.Event | None = None  # set on every delta, for streams that are parsed in Python
        self.error: StreamError | None = None
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.engine_is_done = False  # the finish row was seen, or the channel is closed
        self.owner_is_done = False  # the handler has taken its result

    def settle(self, error: StreamError | None = None) -> None:
        """The answer is complete, or will never be. Later calls change nothing."""
        if self.settled.done():
            return
        self.error = error
        self.settled.set_result(None)
        self.mark_started()
        if self.changed is not None:
            self.changed.set()

    def mark_started(self) -> None:
        if self.started is not None and not self.started.done():
            self.started.set_result(None)

    def mark_finished(self) -> None:
        if self.finished is not None and not self.finished.done():
            self.finished.set_result(None)
