"""Stream: the text side of one choice of one request, from token ids to text that may be shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import orjson

from tokring.server.token_path.interface import Field, Finish, LogprobStyle, Piece, Result, Template
from tokring.server.token_path.reference.detokenizer import build_detokenizer
from tokring.server.token_path.reference.logprobs import LogprobEntry, LogprobRenderer
from tokring.server.token_path.reference.step_frame import LogprobRow
from tokring.server.token_path.reference.stop_matcher import StopMatcher
from tokring.server.token_path.token_table import TokenTable

LOGPROB_PAIR_BYTES = 8  # an id and a float
NO_LOGPROBS = LogprobRow(float("-inf"), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The arguments of TokenPath.open(), which documents them."""

    connection: int | None
    template: Template
    deltas: bool
    stop: Sequence[str]
    include_stop: bool
    min_tokens: int
    skip_special: bool
    hidden_ids: Sequence[int]
    logprob_style: LogprobStyle
    num_logprobs: int
    tokens_as_ids: bool
    text_offset: int
    return_token_ids: bool
    stream_interval: int
    num_prompt_tokens: int
    arrival_ns: int
    strip_leading_space: bool
    prompt_ids: Sequence[int]


class HeldToken(NamedTuple):
    text_end: int  # byte position of decoded text that must be released before the token may be named
    token_id: int
    entry: LogprobEntry | None


class Stream:
    def __init__(self, table: TokenTable, generation: int, options: StreamOptions) -> None:
        # For the whole request.
        self.generation = generation
        self.options = options
        self.token_ids: list[int] = []
        self.first_output_ns = 0
        self.last_publish_ns = 0
        self.finish: Finish | None = None
        self.is_cancelled = False
        self._hidden_ids = frozenset(options.hidden_ids)
        self._detokenizer = build_detokenizer(table, options.skip_special, options.prompt_ids)
        self._matcher = StopMatcher(options.stop, options.include_stop)
        self._renderer = LogprobRenderer(table, options.logprob_style, options.num_logprobs, options.tokens_as_ids)
        self._strips_space = options.strip_leading_space
        self._num_chars = 0  # decoded, held ones included
        self._num_bytes = 0
        self._num_released_bytes = 0
        self._held: deque[HeldToken] = deque()
        # Since the last chunk or take().
        self._text = ""
        self._tokens: list[HeldToken] = []
        self._num_tokens_reported = 0
        self.is_delta_reported = False

    @property
    def stop(self) -> str | None:
        return self._matcher.matched

    @property
    def is_dropping(self) -> bool:
        return self.is_cancelled or self.stop is not None

    def feed(self, token_id: int, row: LogprobRow | None) -> None:
        """Counts a token, decodes it and releases what no stop string can claim any more."""
        self.token_ids.append(token_id)
        entry = None
        if self.options.logprob_style != LogprobStyle.NONE:
            entry = LogprobEntry(token_id, self.options.text_offset + self._num_chars, row or NO_LOGPROBS)
        self._accept("" if token_id in self._hidden_ids else self._detokenizer.feed(token_id))
        # A token with an unfinished character waits for that character: one byte more than there is.
        self._held.append(HeldToken(self._num_bytes + self._detokenizer.is_holding(), token_id, entry))
        self._release_tokens()

    def end(self, finish: Finish) -> None:
        """The finish row: releases everything, unless a stop string or a cancel ended the text before."""
        self.finish = finish
        if not self.is_dropping:
            self._accept(self._detokenizer.flush())
        if not self.is_dropping:
            self._show(self._matcher.flush())
        self._release_tokens()

    def _accept(self, text: str) -> None:
        if text and self._strips_space:
            text, self._strips_space = text.removeprefix(" "), False
        self._num_chars += len(text)
        self._num_bytes += len(text.encode())
        self._show(self._matcher.feed(text, armed=len(self.token_ids) > self.options.min_tokens))

    def _show(self, text: str) -> None:
        self._text += text
        self._num_released_bytes += len(text.encode())

    def _release_tokens(self) -> None:
        everything = self.finish is not None or self.stop is not None
        while self._held and (everything or self._held[0].text_end <= self._num_released_bytes):
            self._tokens.append(self._held.popleft())

    # ---- what goes out ----

    def has_news(self) -> bool:
        """Something to send, and enough of it for the stream's interval."""
        names_tokens = self.options.return_token_ids or self.options.logprob_style != LogprobStyle.NONE
        if not self._text and not (names_tokens and self._tokens):
            return False
        if self._num_tokens_reported == 0 or self.finish is not None or self.is_dropping:
            return True
        return len(self.token_ids) - self._num_tokens_reported >= self.options.stream_interval

    def num_ready_bytes(self) -> int:
        pairs = 1 + self.options.num_logprobs if self.options.logprob_style != LogprobStyle.NONE else 0
        return len(self._text.encode()) + len(self._tokens) * pairs * LOGPROB_PAIR_BYTES

    def render(self) -> bytes:
        """The next event by the stream's template; takes what is ready."""
        values = {
            Field.TEXT: orjson.dumps(self._text)[1:-1],
            Field.TOKEN_IDS: b"[" + b",".join(b"%d" % token.token_id for token in self._tokens) + b"]",
            Field.COMPLETION_TOKENS: b"%d" % len(self.token_ids),
            Field.TOTAL_TOKENS: b"%d" % (self.options.num_prompt_tokens + len(self.token_ids)),
            Field.LOGPROBS: self._logprobs() or b"null",
        }
        self.discard()
        return b"".join(values[part] if isinstance(part, Field) else part for part in self.options.template)

    def take(self) -> Piece:
        ids = np.array([token.token_id for token in self._tokens], dtype=np.int32)
        piece = Piece(self._text, ids, self._logprobs(), len(self.token_ids))
        self.discard()
        self.is_delta_reported = False
        return piece

    def discard(self) -> None:
        self._text, self._tokens = "", []
        self._num_tokens_reported = len(self.token_ids)

    def _logprobs(self) -> bytes | None:
        if self.options.logprob_style == LogprobStyle.NONE:
            return None
        return self._renderer.render([token.entry for token in self._tokens if token.entry is not None])

    def result(self) -> Result:
        return Result(
            num_tokens=len(self.token_ids),
            num_text_bytes=self._num_released_bytes,
            stop=self.stop,
            first_output_ns=self.first_output_ns,
            last_publish_ns=self.last_publish_ns,
            finish=self.finish,
        )
