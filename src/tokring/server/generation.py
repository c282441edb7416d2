"""Generation: every sequence of one HTTP request (prompts × choices), from stream slots to outcomes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from tokring.request_record import NO_STREAM_SLOT, to_record
from tokring.sampling_params import SamplingParams
from tokring.server.deadlines import NO_DEADLINES, Deadlines, seconds_until
from tokring.server.engine_client import EngineClient
from tokring.server.errors import ApiError
from tokring.server.stream import Siblings, Stream, StreamError
from tokring.server.token_path import Finish, LogprobStyle, Template
from tokring_ipc import FinishReason

MAX_FINISH_DELAY_S = 1.0
TIMED_OUT = StreamError(408, "The request was not finished within its timeout.", "timeout")

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "stop",
    FinishReason.ABORT: "stop",  # only reached after a stop string: the front end's own cancel
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one prompt, its parameters with max_tokens explicit, and its text where an echo needs it."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How the tokens of a request become text and logprobs."""

    eos_ids: Sequence[int] = ()
    logprob_style: LogprobStyle = LogprobStyle.NONE
    tokens_as_ids: bool = False
    return_token_ids: bool = False
    deltas: bool = False  # text is taken piece by piece (tool parsers) instead of being rendered by the token path
    stream_interval: int = 1


@dataclass(slots=True)
class Choice:
    """One sequence: its index in the answer, its prompt, and the stream that generates it."""

    index: int
    prompt: Prompt
    choice_index: int
    stream: Stream
    template: Template = ()
    text_offset: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a settled choice came to. `finish` is None if a stop string ended it before the engine's own last word."""

    choice: Choice
    text: str
    token_ids: list[int]
    logprobs: bytes | None
    num_tokens: int
    finish_reason: str
    stop_reason: int | str | None
    first_output_ns: int  # CLOCK_MONOTONIC when the front end had the first token; 0: there was none
    finish: Finish | None


@dataclass(slots=True)
class Generation:
    """Use as a context manager: on leaving, whatever still runs is cancelled and every slot goes back."""

    engine: EngineClient
    prompts: Sequence[Prompt]
    options: TextOptions
    arrival_ns: int
    deadlines: Deadlines = NO_DEADLINES
    choices: list[Choice] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Generation":
        """Takes the stream slots. Raises ApiError (503) if there are not enough."""
        counts = [prompt.params.num_choices for prompt in self.prompts]
        num_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        streams = iter(self.engine.open(sum(counts), self.arrival_ns, num_tokens))
        for prompt, count in zip(self.prompts, counts, strict=True):
            siblings = Siblings(count)
            for choice_index in range(count):
                self.choices.append(Choice(len(self.choices), prompt, choice_index, next(streams)))
                self.choices[-1].stream.siblings = siblings
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for choice in self.choices:
            self.engine.release(choice.stream)

    @property
    def streams(self) -> list[Stream]:
        return [choice.stream for choice in self.choices]

    def submit(self, connection: int | None = None) -> None:
        """Opens every stream in the token path (towards `connection`, or for collection) and submits the requests.

        Raises ApiError (503) if the request ring is full; sequences behind the first wait for room.
        """
        if self.deadlines.end_ns:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds_until(self.deadlines.end_ns), self._expire)
        for choice in self.choices:
            self._open(choice, connection)
        seeds: dict[int, int] = {}
        parents: dict[int, int] = {}
        for position, choice in enumerate(self.choices):
            prompt_key = id(choice.prompt)
            seed = seeds.setdefault(prompt_key, self._seed_of(choice.prompt.params))
            parent = parents.setdefault(prompt_key, choice.stream.slot)
            try:
                self._submit(choice, seed, parent if choice.choice_index else NO_STREAM_SLOT, may_wait=position > 0)
            except BaseException:
                for unsent in self.choices[position:]:
                    self.engine.never_submitted(unsent.stream)
                raise

    def _seed_of(self, params: SamplingParams) -> int:
        return self.engine.draw_seed() if params.seed is None else params.seed

    def _open(self, choice: Choice, connection: int | None) -> None:
        params, options, stream = choice.prompt.params, self.options, choice.stream
        hidden_ids = [] if params.ignore_eos else list(options.eos_ids)
        if not params.include_stop_str_in_output:
            hidden_ids += params.stop_token_ids
        if options.deltas:
            stream.changed = asyncio.Event()
        self.engine.token_path.open(
            stream.slot,
            stream.generation,
            connection=None if options.deltas else connection,
            template=choice.template,
            deltas=options.deltas,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special=params.skip_special_tokens,
            hidden_ids=hidden_ids,
            logprob_style=options.logprob_style,
            num_logprobs=params.logprobs or 0,
            tokens_as_ids=options.tokens_as_ids,
            text_offset=choice.text_offset,
            return_token_ids=options.return_token_ids,
            stream_interval=options.stream_interval,
            num_prompt_tokens=len(choice.prompt.token_ids),
            arrival_ns=stream.arrival_ns,
            prompt_ids=choice.prompt.token_ids,
        )
        stream.is_open = True

    def _submit(self, choice: Choice, seed: int, parent_slot: int, *, may_wait: bool) -> None:
        params, stream = choice.prompt.params, choice.stream
        assert params.max_tokens is not None
        stream.params, stream.choice_index = params, choice.choice_index
        record, extensions = to_record(
            params,
            stream_slot=stream.slot,
            slot_generation=stream.generation,
            max_tokens=params.max_tokens,
            eos_ids=self.options.eos_ids,
            seed=seed,
            arrival_ns=stream.arrival_ns,
            choice_index=choice.choice_index,
            parent_slot=parent_slot,
            deadline_ns=self.deadlines.start_ns,
        )
        ids = np.asarray(choice.prompt.token_ids, np.int32)
        self.engine.submit(stream, record, ids, extensions, may_wait=may_wait)

    def _expire(self) -> None:
        for choice in self.choices:
            if not choice.stream.settled.done():
                choice.stream.settle(TIMED_OUT)
                self.engine.cancel(choice.stream)

    async def all_settled(self) -> None:
        """Waits for every choice. Raises ApiError of the first that failed."""
        for choice in self.choices:
            await choice.stream.settled
            raise_stream_error(choice.stream)

    @property
    def is_finished(self) -> bool:
        """Whether the engine's last word on every choice is in."""
        return all(choice.stream.engine_is_done for choice in self.choices)

    async def all_finished(self) -> None:
        """Waits for the engine's last word on choices that a stop string ended: it comes with the engine's next step.

        Usage needs it (cached tokens). Gives up after MAX_FINISH_DELAY_S: the answer is complete without.
        """
        loop = asyncio.get_running_loop()
        open_streams = [choice.stream for choice in self.choices if not choice.stream.engine_is_done]
        for stream in open_streams:
            stream.finished = loop.create_future()
        if open_streams:
            pending = [stream.finished for stream in open_streams if stream.finished is not None]
            await asyncio.wait(pending, timeout=MAX_FINISH_DELAY_S)

    async def first_tokens(self, choices: Sequence[Choice], timeout_s: float) -> bool:
        """Whether each of these choices got a token or ended, within the time."""
        waited = [self.engine.first_token(choice.stream) for choice in choices]
        _, pending = await asyncio.wait(waited, timeout=timeout_s)
        return not pending

    def outcome(self, choice: Choice, *, take: bool) -> Outcome:
        """The outcome of a settled choice; `take`: with its text, ids and logprobs (collected streams only)."""
        path, slot = self.engine.token_path, choice.stream.slot
        result = self.engine.result(choice.stream)
        piece = path.take(slot) if take else None
        finish = result.finish
        reason = "stop" if result.stop is not None or finish is None else _FINISH_REASONS[FinishReason(finish.reason)]
        return Outcome(
            choice=choice,
            text=piece.text if piece else "",
            token_ids=piece.token_ids.tolist() if piece else [],
            logprobs=piece.logprobs if piece else None,
            num_tokens=result.num_tokens,
            finish_reason=reason,
            stop_reason=_stop_reason(choice.prompt.params, result.stop, finish),
            first_output_ns=result.first_output_ns,
            finish=finish,
        )


def raise_stream_error(stream: Stream) -> None:
    """Raises the ApiError of a stream that failed; of a constraint it names the request's field."""
    error = stream.error
    if error is None:
        return
    constraint = stream.params.structured_output if stream.params is not None else None
    param = constraint.param if constraint is not None and error.code == "invalid_grammar" else None
    raise ApiError(error.status, error.message, param=param, code=error.code)


def usage_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """OpenAI's usage object: each prompt counts once, every generated token counts."""
    prompts = {id(outcome.choice.prompt): len(outcome.choice.prompt.token_ids) for outcome in outcomes}
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(outcome.num_tokens for outcome in outcomes)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    firsts = [outcome.finish for outcome in outcomes if outcome.choice.choice_index == 0]
    if all(finish is not None for finish in firsts):
        cached = sum(finish.num_cached_tokens for finish in firsts if finish is not None)
        usage["prompt_tokens_details"] = {"cached_tokens": min(cached, prompt_tokens)}
    return usage


def _stop_reason(params: SamplingParams, stop: str | None, finish: Finish | None) -> int | str | None:
    """vLLM's stop_reason: the stop string or the client's stop token id; None for end-of-text and length."""
    if stop is not None:
        return stop
    if finish is not None and finish.reason == FinishReason.STOP and finish.stop_id in params.stop_token_ids:
        return finish.stop_id
    return None
