"""Answers of /v1/chat/completions: bodies, chunks, tool calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tokring.server.answer_head import AnswerHead
from tokring.server.event_stream import EventStream, event
from tokring.server.generation import Choice, Generation, Outcome
from tokring.server.prompt_logprobs import PromptLogprobTable
from tokring.server.token_path import Field, Piece, Template, TokenTable
from tokring.server.tool_parser import ToolParser

CHUNK_KIND = "chat.completion.chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """See AnswerFormat. `new_parser`: makes the tool parser of a choice; None if no call can be in the text."""

    head: AnswerHead
    table: TokenTable
    logprobs: int | None = None
    prompt_logprobs: bool = False
    new_parser: Callable[[], ToolParser] | None = None
    reports_tool_calls: bool = True  # finish_reason "tool_calls"; OpenAI says "stop" after a named tool_choice
    _parsers: dict[int, ToolParser] = field(default_factory=dict)  # by choice index, of streamed choices

    def template(self, choice: Choice) -> Template:
        entry: list[bytes | Field] = [b'"delta":{"content":"', Field.TEXT, b'"},"logprobs":']
        entry += [Field.LOGPROBS if self.logprobs is not None else b"null", b',"finish_reason":null']
        return self.head.template(CHUNK_KIND, choice, entry)

    def text_offset(self, choice: Choice) -> int:
        return 0

    def opening_events(self, choices: Sequence[Choice]) -> bytes:
        return b"".join(event(self._role_chunk(choice)) for choice in choices)

    def _role_chunk(self, choice: Choice) -> bytes:
        chunk = self._chunk(choice, {"role": "assistant", "content": ""}, None, 0)
        if choice.index == 0:
            chunk.update(self._prompt_fields(choice))
        return orjson.dumps(chunk)

    def finish_event(self, outcome: Outcome) -> bytes:
        finish_reason = self._finish_reason(outcome, self._has_calls(outcome.choice))
        chunk = self._chunk(outcome.choice, {}, finish_reason, outcome.num_tokens)
        chunk["choices"][0]["stop_reason"] = outcome.stop_reason
        return orjson.dumps(chunk)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return orjson.dumps({**self.head.fields(CHUNK_KIND), "choices": [], "usage": usage})

    def body(self, outcomes: Sequence[Outcome], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [self._body_choice(outcome) for outcome in outcomes]
        body = {**self.head.fields("chat.completion"), "choices": choices, "usage": usage}
        body.update(self._prompt_fields(outcomes[0].choice))
        return body

    async def parsed_stream(self, choice: Choice, generation: Generation, stream: EventStream) -> bool:
        if self.new_parser is None:
            return False
        parser = self.new_parser()
        self._parsers[choice.index] = parser
        changed, path = choice.stream.changed, generation.engine.token_path
        assert changed is not None
        while True:
            await changed.wait()
            changed.clear()
            is_settled = choice.stream.settled.done()
            piece = path.take(choice.stream.slot)
            deltas = parser.feed(piece.text)
            if is_settled:
                deltas += parser.finish()
            events = self._events_of(choice, deltas, piece)
            if events:
                stream.write(events)
            if is_settled:
                return True

    def _events_of(self, choice: Choice, deltas: list[dict[str, Any]], piece: Piece) -> bytes:
        """One event per delta; ids and logprobs of the tokens behind them ride on the first, which may be empty."""
        token_ids = piece.token_ids.tolist()
        if not deltas and token_ids and (piece.logprobs is not None or self.head.return_token_ids):
            deltas = [{}]
        events = []
        for position, delta in enumerate(deltas):
            chunk = self._chunk(choice, delta, None, piece.num_tokens)
            if position == 0 and piece.logprobs is not None:
                chunk["choices"][0]["logprobs"] = orjson.Fragment(piece.logprobs)
            if position == 0 and self.head.return_token_ids:
                chunk["choices"][0]["token_ids"] = token_ids
            events.append(event(orjson.dumps(chunk)))
        return b"".join(events)

    def _body_choice(self, outcome: Outcome) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        text = outcome.text
        if self.new_parser is not None:
            text, calls = self.new_parser().parse(outcome.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message.update(content=text or None, tool_calls=calls)
        entry: dict[str, Any] = {
            "index": outcome.choice.index,
            "message": message,
            "logprobs": orjson.Fragment(outcome.logprobs) if outcome.logprobs is not None else None,
            "finish_reason": self._finish_reason(outcome, bool(calls)),
            "stop_reason": outcome.stop_reason,
        }
        if self.head.return_token_ids:
            entry["token_ids"] = outcome.token_ids
        return entry

    def _has_calls(self, choice: Choice) -> bool:
        parser = self._parsers.get(choice.index)
        return parser is not None and parser.num_calls > 0

    def _finish_reason(self, outcome: Outcome, has_calls: bool) -> str:
        return (
            "tool_calls"
            if has_calls and self.reports_tool_calls and outcome.finish_reason == "stop"
            else outcome.finish_reason
        )

    def _prompt_fields(self, choice: Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.head.return_token_ids:
            fields["prompt_token_ids"] = choice.prompt.token_ids
        if self.prompt_logprobs:
            table = PromptLogprobTable(choice.prompt.token_ids, choice.stream.prompt_logprobs, self.table)
            fields["prompt_logprobs"] = table.as_prompt_logprobs()
        return fields

    def _chunk(
        self, choice: Choice, delta: dict[str, Any], finish_reason: str | None, num_tokens: int
    ) -> dict[str, Any]:
        entry = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self.head.chunk(CHUNK_KIND, choice, entry, num_tokens)
