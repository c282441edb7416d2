"""Logprobs as the JSON that clients of the chat and completions routes expect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import orjson

from tokring.server.token_path.interface import MISSING_LOGPROB, LogprobStyle
from tokring.server.token_path.reference.step_frame import LogprobRow
from tokring.server.token_path.token_table import TokenTable


class LogprobEntry(NamedTuple):
    token_id: int
    text_offset: int  # characters before the token
    row: LogprobRow


class LogprobRenderer:
    """Renders entries of one stream; `width` is the number of top entries that its client asked for."""

    def __init__(self, table: TokenTable, style: LogprobStyle, width: int, tokens_as_ids: bool) -> None:
        self._table = table
        self._style = style
        self._width = width
        self._tokens_as_ids = tokens_as_ids

    def render(self, entries: Sequence[LogprobEntry]) -> bytes:
        if self._style == LogprobStyle.CHAT:
            return b'{"content":[' + b",".join(map(self._chat_entry, entries)) + b"]}"
        columns = (
            (b"text_offset", [b"%d" % entry.text_offset for entry in entries]),
            (b"token_logprobs", [format_logprob(entry.row.logprob) for entry in entries]),
            (b"tokens", [self._quoted(entry.token_id) for entry in entries]),
            (b"top_logprobs", [self._top_object(entry) for entry in entries]),
        )
        return b"{" + b",".join(b'"%b":[%b]' % (name, b",".join(values)) for name, values in columns) + b"}"

    def _chat_entry(self, entry: LogprobEntry) -> bytes:
        top = b",".join(b"{%b}" % self._token_fields(*pair) for pair in entry.row.top[: self._width])
        return b'{%b,"top_logprobs":[%b]}' % (self._token_fields(entry.token_id, entry.row.logprob), top)

    def _token_fields(self, token_id: int, logprob: float) -> bytes:
        raw = b",".join(b"%d" % byte for byte in self._table.bytes_of(token_id))
        return b'"token":%b,"logprob":%b,"bytes":[%b]' % (self._quoted(token_id), format_logprob(logprob), raw)

    def _top_object(self, entry: LogprobEntry) -> bytes:
        """{token: logprob}: the best ones, then the chosen one if missing. Of equal names the first stays."""
        pairs: dict[bytes, bytes] = {}
        for token_id, logprob in [*entry.row.top[: self._width], (entry.token_id, entry.row.logprob)]:
            pairs.setdefault(self._quoted(token_id), format_logprob(logprob))
        return b"{" + b",".join(b"%b:%b" % pair for pair in pairs.items()) + b"}"

    def _quoted(self, token_id: int) -> bytes:
        if self._tokens_as_ids:
            return b'"token_id:%d"' % token_id
        return orjson.dumps(self._table.bytes_of(token_id).decode("utf-8", "replace"))


def format_logprob(value: float) -> bytes:
    """The shortest digits that read back as the same float32, always as a JSON float; never below MISSING_LOGPROB."""
    if not math.isfinite(value) or value < MISSING_LOGPROB:
        value = MISSING_LOGPROB
    scientific = np.format_float_scientific(np.float32(value), unique=True, trim="-", exp_digits=2)
    fixed = np.format_float_positional(np.float32(value), unique=True, trim="-")
    text = fixed if len(fixed) <= len(scientific) else scientific
    return (text if "." in text or "e" in text else text + ".0").encode()
