"""Token ids to text, a token at a time: nothing half, nothing lost."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokring.server.token_path.token_table import TokenTable

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def feed(self, token_id: int) -> str:
        """The text that `token_id` completes."""

    def flush(self) -> str:
        """What is left at the end: an unfinished character becomes one U+FFFD."""

    def is_holding(self) -> bool:
        """Bytes were fed whose text is not out yet."""


class TableDetokenizer:
    """Bytes by table, then UTF-8 with one U+FFFD per maximal subpart of what is broken (as browsers do)."""

    def __init__(self, table: TokenTable, skip_special: bool) -> None:
        self._table = table
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if self._skip_special and self._table.is_special(token_id):
            return ""
        return self._utf8.decode(self._table.bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def is_holding(self) -> bool:
        return self._utf8.getstate()[0] != b""


class WindowDetokenizer:
    """For decoders that need context: the difference of two decodes of a short window.

    tokenizers' own DecodeStream does the same, but loses what it holds at the end and raises on some sequences.
    """

    def __init__(self, table: TokenTable, skip_special: bool, prompt_ids: Sequence[int]) -> None:
        self._table = table
        self._skip_special = skip_special
        self._window = list(prompt_ids[-6:])
        self._num_read = len(self._window)  # tokens of the window whose text is out

    def feed(self, token_id: int) -> str:
        if not 0 <= token_id < self._table.num_tokens:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        return text

    def flush(self) -> str:
        text = self._new_text() if self.is_holding() else ""
        self._num_read = len(self._window)
        return text

    def is_holding(self) -> bool:
        return self._num_read < len(self._window)

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._num_read])
        return self._decode(self._window)[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._table.tokenizer.decode(token_ids, skip_special_tokens=self._skip_special))


def build_detokenizer(table: TokenTable, skip_special: bool, prompt_ids: Sequence[int]) -> Detokenizer:
    if table.family == "stream":
        return WindowDetokenizer(table, skip_special, prompt_ids)
    return TableDetokenizer(table, skip_special)
