"""Logprobs of prompt tokens, as `echo` with `logprobs` and vLLM's `prompt_logprobs` show them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokring.server.stream import PromptLogprobs
from tokring.server.token_path import TokenTable

MISSING = -9999.0  # what JSON cannot say: -inf and NaN


class PromptLogprobTable:
    """The prompt's logprobs put together from the engine's frames; position 0 has none."""

    def __init__(self, token_ids: Sequence[int], parts: Sequence[PromptLogprobs], table: TokenTable) -> None:
        self._token_ids = token_ids
        self._table = table
        self._entries: list[tuple[float, int, list[tuple[int, float]]] | None] = [None] * len(token_ids)
        for part in parts:
            for row in range(len(part.logprob)):
                position = part.start + row
                if 0 < position < len(token_ids):
                    self._entries[position] = (_finite(part.logprob[row]), int(part.rank[row]), _top_entries(part, row))

    def as_completion_logprobs(self, num_top: int, tokens_as_ids: bool) -> dict[str, list[Any]]:
        """The columns of OpenAI's completion logprobs for an echoed prompt."""
        texts = [self._name(token_id, tokens_as_ids) for token_id in self._token_ids]
        offsets, offset = [], 0
        for token_id in self._token_ids:
            offsets.append(offset)
            offset += len(self._text(token_id))
        tops: list[dict[str, float] | None] = []
        for token_id, entry in zip(self._token_ids, self._entries, strict=True):
            tops.append(None if entry is None else self._top(token_id, entry, num_top, tokens_as_ids))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if entry is None else entry[0] for entry in self._entries],
            "tokens": texts,
            "top_logprobs": tops,
        }

    def as_prompt_logprobs(self) -> list[dict[str, Any] | None]:
        """vLLM's prompt_logprobs: per position {token id: {logprob, rank, decoded_token}}."""
        rows: list[dict[str, Any] | None] = []
        for token_id, entry in zip(self._token_ids, self._entries, strict=True):
            if entry is None:
                rows.append(None)
                continue
            logprob, rank, top = entry
            row = {str(token_id): self._describe(token_id, logprob, rank)}
            for position, (top_id, top_logprob) in enumerate(top):
                row.setdefault(str(top_id), self._describe(top_id, top_logprob, position + 1))
            rows.append(row)
        return rows

    def _describe(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._text(token_id)}

    def _top(
        self, token_id: int, entry: tuple[float, int, list[tuple[int, float]]], num_top: int, tokens_as_ids: bool
    ) -> dict[str, float]:
        top = {self._name(top_id, tokens_as_ids): logprob for top_id, logprob in reversed(entry[2][:num_top])}
        top = dict(reversed(top.items()))
        top.setdefault(self._name(token_id, tokens_as_ids), entry[0])
        return top

    def _name(self, token_id: int, tokens_as_ids: bool) -> str:
        return f"token_id:{token_id}" if tokens_as_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        if token_id >= self._table.num_tokens:
            return ""
        start, end = int(self._table.offsets[token_id]), int(self._table.offsets[token_id + 1])
        return self._table.data[start:end].decode("utf-8", "replace")


def _top_entries(part: PromptLogprobs, row: int) -> list[tuple[int, float]]:
    pairs = zip(part.top_id[row].tolist(), part.top_logprob[row].tolist(), strict=True)
    return [(token_id, _finite(logprob)) for token_id, logprob in pairs if token_id >= 0]


def _finite(value: float | np.float32) -> float:
    value = float(value)
    return value if math.isfinite(value) else MISSING
