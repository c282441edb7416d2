"""How a generation is answered: one JSON body, or a stream of events; what they look like is the AnswerFormat's."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import orjson
from aiohttp import web

from tokring.server.api_types import GenerationFields
from tokring.server.deadlines import deadlines_of
from tokring.server.errors import ApiError
from tokring.server.event_stream import DONE, PING, PING_AFTER_NS, ClientGone, EventStream, event
from tokring.server.front_end import FrontEnd
from tokring.server.generation import Choice, Generation, Outcome, Prompt, TextOptions, raise_stream_error, usage_of
from tokring.server.middleware import ARRIVAL_NS, STAGES
from tokring.server.server_timing import timing_comment, timing_header
from tokring.server.stream_options import wants_usage
from tokring.server.token_path import Template
from tokring.server.tracing import FAILURE, OUTCOMES

# Answers that may still be refused (grammar), or begin with the prompts' logprobs, wait so long with their headers.
MAX_HEADER_DELAY_S = 10.0


class AnswerFormat(Protocol):
    """The JSON of one route's answers."""

    def template(self, choice: Choice) -> Template:
        """A text chunk of the choice, for the token path."""

    def text_offset(self, choice: Choice) -> int:
        """Characters in front of the generated text (echo)."""

    def opening_events(self, choices: Sequence[Choice]) -> bytes:
        """Events before the first token: roles, echoed prompts."""

    def finish_event(self, outcome: Outcome) -> bytes:
        """The event that carries a choice's finish_reason."""

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The event after all choices, if usage was asked for."""

    def body(self, outcomes: Sequence[Outcome], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, not streamed."""

    async def parsed_stream(self, choice: Choice, generation: Generation, stream: EventStream) -> bool:
        """Writes a choice's text itself, where it is parsed (tools); False leaves that to the token path."""


async def answer_generation(
    request: web.Request,
    front_end: FrontEnd,
    body: GenerationFields,
    prompts: Sequence[Prompt],
    options: TextOptions,
    answer: AnswerFormat,
) -> web.StreamResponse:
    """Generates for the prompts and answers as `body` asks for it: whole, or streamed. Raises ApiError."""
    arrival_ns = request[ARRIVAL_NS]
    deadlines = deadlines_of(request, arrival_ns, body.timeout)
    with Generation(front_end.engine, prompts, options, arrival_ns, deadlines) as generation:
        if body.stream:
            return await _answer_stream(request, generation, answer, wants_usage(body))
        return await _answer_whole(request, generation, answer)


async def _answer_whole(request: web.Request, generation: Generation, answer: AnswerFormat) -> web.Response:
    """Collects every choice and answers with one JSON body. Raises ApiError if one failed."""
    for choice in generation.choices:
        choice.text_offset = answer.text_offset(choice)
    generation.submit()
    await generation.all_settled()
    await generation.all_finished()
    outcomes = [generation.outcome(choice, take=True) for choice in generation.choices]
    body = answer.body(outcomes, usage_of(outcomes))
    timing = timing_header(outcomes, generation.arrival_ns)
    request[STAGES], request[OUTCOMES] = timing, outcomes
    return web.Response(
        body=orjson.dumps(body),
        content_type="application/json",
        headers={"Server-Timing": timing} if timing else None,
    )


async def _answer_stream(
    request: web.Request, generation: Generation, answer: AnswerFormat, include_usage: bool
) -> web.StreamResponse:
    """Streams every choice. Errors before the headers raise ApiError; later ones become an event."""
    stream = EventStream(request, generation.engine)
    try:
        for choice in generation.choices:
            choice.template = answer.template(choice)
            choice.text_offset = answer.text_offset(choice)
        generation.submit(stream.connection)
        stream.streams = generation.streams
        await _until_begun(generation, stream)
        await stream.start(answer.opening_events(generation.choices))
        await _until_gone(stream, _stream_choices(request, generation, answer, include_usage, stream))
        await stream.finish()
    except ClientGone:
        pass
    finally:
        stream.close()
    return stream.response


async def _until_begun(generation: Generation, stream: EventStream) -> None:
    """Waits with the headers for what may still be refused, and with the first events if they have prompt logprobs.

    Raises ApiError if a choice has failed before the headers.
    """
    params = generation.prompts[0].params
    has_prompt_logprobs = params.prompt_logprobs is not None
    if not (has_prompt_logprobs or params.structured_output is not None or generation.deadlines.start_ns):
        return
    awaited = generation.choices if has_prompt_logprobs else generation.choices[:1]
    have_begun = await generation.first_tokens(awaited, MAX_HEADER_DELAY_S)
    for choice in awaited:
        if choice.stream.settled.done():
            raise_stream_error(choice.stream)
    while has_prompt_logprobs and not have_begun:
        await stream.send_early(PING)
        have_begun = await generation.first_tokens(awaited, PING_AFTER_NS / 1e9)


async def _stream_choices(
    request: web.Request, generation: Generation, answer: AnswerFormat, include_usage: bool, stream: EventStream
) -> None:
    """Writes each choice's finish event as it finishes, usage and [DONE] behind the last; or an error and [DONE]."""
    finished: list[Choice] = []

    async def finish(choice: Choice) -> None:
        await answer.parsed_stream(choice, generation, stream)
        await choice.stream.settled
        raise_stream_error(choice.stream)
        outcome = generation.outcome(choice, take=False)
        finished.append(choice)
        last = event(answer.finish_event(outcome))
        if len(finished) < len(generation.choices):
            stream.write(last)
            return
        if include_usage and not generation.is_finished:
            stream.write(last)
            last = b""
            await generation.all_finished()
        # In one write: the end of the answer is one packet.
        stream.write(last + _closing_events(request, generation, answer, include_usage), end=True)

    try:
        await _all_of([finish(choice) for choice in generation.choices])
    except ApiError as error:
        request[FAILURE] = error.status
        stream.write(event(error.body()) + DONE, end=True)


def _closing_events(request: web.Request, generation: Generation, answer: AnswerFormat, include_usage: bool) -> bytes:
    outcomes = [generation.outcome(choice, take=False) for choice in generation.choices]
    timing = timing_header(outcomes, generation.arrival_ns)
    request[STAGES], request[OUTCOMES] = timing, outcomes
    usage = event(answer.usage_event(usage_of(outcomes))) if include_usage else b""
    return usage + timing_comment(timing) + DONE


async def _all_of(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all; the first error ends the others. A single one needs no task of its own."""
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _until_gone(stream: EventStream, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, ended early by ClientGone when the token path finds the connection dead."""
    task = asyncio.ensure_future(work)
    either: tuple[asyncio.Future[Any], ...] = (task, stream.gone)
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone(stream.gone.result())
        task.result()
    finally:
        task.cancel()
