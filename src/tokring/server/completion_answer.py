"""Answers of /v1/completions: bodies, chunks, echo, best_of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tokring.server.answer_head import AnswerHead
from tokring.server.event_stream import EventStream, event
from tokring.server.generation import Choice, Generation, Outcome
from tokring.server.prompt_logprobs import PromptLogprobTable
from tokring.server.token_path import Field, Template, TokenTable

KIND = "text_completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAnswer:
    """See AnswerFormat. `logprobs`: entries per token, None without; `echo_only`: max_tokens 0, the prompt alone."""

    head: AnswerHead
    table: TokenTable
    num_choices: int
    echo: bool = False
    echo_only: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    tokens_as_ids: bool = False

    def template(self, choice: Choice) -> Template:
        entry: list[bytes | Field] = [b'"text":"', Field.TEXT, b'","logprobs":']
        entry += [Field.LOGPROBS if self.logprobs is not None else b"null", b',"finish_reason":null,"stop_reason":null']
        return self.head.template(KIND, choice, entry)

    def text_offset(self, choice: Choice) -> int:
        return len(choice.prompt.text or "") if self.echo else 0

    def opening_events(self, choices: Sequence[Choice]) -> bytes:
        return b"".join(event(self._opening_chunk(choice)) for choice in choices if self._has_opening)

    @property
    def _has_opening(self) -> bool:
        return self.echo or self.head.return_token_ids or self.prompt_logprobs

    def _opening_chunk(self, choice: Choice) -> bytes:
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": choice.prompt.text if self.echo else "",
            "logprobs": self._echoed_logprobs(choice),
            "finish_reason": None,
            "stop_reason": None,
        }
        self._add_prompt_fields(entry, choice)
        return orjson.dumps(self.head.chunk(KIND, choice, entry, 0))

    def finish_event(self, outcome: Outcome) -> bytes:
        entry = {
            "index": outcome.choice.index,
            "text": "",
            "logprobs": None,
            "finish_reason": outcome.finish_reason,
            "stop_reason": outcome.stop_reason,
        }
        return orjson.dumps(self.head.chunk(KIND, outcome.choice, entry, outcome.num_tokens))

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return orjson.dumps({**self.head.fields(KIND), "choices": [], "usage": usage})

    def body(self, outcomes: Sequence[Outcome], usage: dict[str, Any]) -> dict[str, Any]:
        chosen = self._best(outcomes)
        choices = [self._body_choice(index, outcome) for index, outcome in enumerate(chosen)]
        if self.echo_only:
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {**self.head.fields(KIND), "choices": choices, "usage": usage}

    async def parsed_stream(self, choice: Choice, generation: Generation, stream: EventStream) -> bool:
        return False

    def _body_choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        choice = outcome.choice
        text = "" if self.echo_only else outcome.text
        entry: dict[str, Any] = {
            "index": index,
            "text": (choice.prompt.text or "") + text if self.echo else text,
            "logprobs": self._body_logprobs(outcome),
            "finish_reason": "length" if self.echo_only else outcome.finish_reason,
            "stop_reason": None if self.echo_only else outcome.stop_reason,
        }
        if self.head.return_token_ids:
            entry["token_ids"] = [] if self.echo_only else outcome.token_ids
        self._add_prompt_fields(entry, choice)
        return entry

    def _add_prompt_fields(self, entry: dict[str, Any], choice: Choice) -> None:
        if self.head.return_token_ids:
            entry["prompt_token_ids"] = choice.prompt.token_ids
        if self.prompt_logprobs:
            entry["prompt_logprobs"] = self._prompt_table(choice).as_prompt_logprobs()

    def _body_logprobs(self, outcome: Outcome) -> Any:
        if self.logprobs is None:
            return None
        generated: dict[str, list[Any]] = orjson.loads(outcome.logprobs or b"{}")
        if not self.echo:
            return generated or None
        echoed = self._echoed_logprobs(outcome.choice)
        if not self.echo_only and echoed is not None:
            for key, values in generated.items():
                echoed[key] = echoed[key] + values
        return echoed

    def _echoed_logprobs(self, choice: Choice) -> dict[str, list[Any]] | None:
        if self.logprobs is None or not self.echo:
            return None
        return self._prompt_table(choice).as_completion_logprobs(self.logprobs, self.tokens_as_ids)

    def _prompt_table(self, choice: Choice) -> PromptLogprobTable:
        return PromptLogprobTable(choice.prompt.token_ids, choice.stream.prompt_logprobs, self.table)

    def _best(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Of each prompt's choices the n most likely ones (mean logprob per token), likeliest first, if best_of > n."""
        params = outcomes[0].choice.prompt.params
        if params.num_choices == self.num_choices:
            return list(outcomes)
        chosen: list[Outcome] = []
        for start in range(0, len(outcomes), params.num_choices):
            group = outcomes[start : start + params.num_choices]
            chosen += sorted(group, key=_mean_logprob, reverse=True)[: self.num_choices]
        return chosen


def _mean_logprob(outcome: Outcome) -> float:
    values: list[float] = orjson.loads(outcome.logprobs or b"{}").get("token_logprobs") or [0.0]
    return sum(values) / len(values)
