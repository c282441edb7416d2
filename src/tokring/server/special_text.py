"""SpecialTextGuard: text that looks like a control token in what clients send stays plain text."""

import re
import secrets
from collections.abc import Sequence
from typing import Any

import tokenizers


class SpecialTextGuard:
    """Two steps around the chat template.

    `protect` replaces the text of special tokens in a client's strings by marks of its own; the template then adds the
    real ones; `encode` splits the rendered text at the real ones and encodes everything between them, marks put back
    to their text, with special tokens switched off. Splitting there is what the tokenizer itself does first.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        special = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._ids = special
        self._texts = sorted((text for text in special if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) if self._texts else r"(?!)")
        # Private-use characters around a number nobody outside this process can know.
        self._mark = f"\uf8d0{secrets.token_hex(8)}:"
        self._mark_pattern = re.compile(re.escape(self._mark) + r"(\d+)\uf8d1")
        self._plain_tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._plain_tokenizer.encode_special_tokens = True

    def found_in(self, value: Any) -> bool:
        """Whether any string inside a JSON-like value holds the text of a special token."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, dict):
            return any(self.found_in(key) or self.found_in(item) for key, item in value.items())
        return isinstance(value, list) and any(self.found_in(item) for item in value)

    def protect(self, value: Any) -> Any:
        """The same value with marks in place of special-token text."""
        if isinstance(value, str):
            return self._pattern.sub(self._mark_of, value)
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        return [self.protect(item) for item in value] if isinstance(value, list) else value

    def reveal(self, text: str) -> str:
        """Rendered text with the marks put back to the text they stand for."""
        return self._mark_pattern.sub(lambda match: self._texts[int(match[1])], text)

    def encode(self, rendered: str) -> list[int]:
        """Token ids of rendered text: special tokens where the template wrote them, plain text elsewhere."""
        pieces: list[str] = []
        specials: list[int] = []
        position = 0
        for match in self._pattern.finditer(rendered):
            pieces.append(self.reveal(rendered[position : match.start()]))
            specials.append(self._ids[match[0]])
            position = match.end()
        pieces.append(self.reveal(rendered[position:]))
        encodings: Sequence[tokenizers.Encoding] = self._plain_tokenizer.encode_batch_fast(
            pieces, add_special_tokens=False
        )
        token_ids = list(encodings[0].ids)
        for special, encoding in zip(specials, encodings[1:], strict=True):
            token_ids.append(special)
            token_ids.extend(encoding.ids)
        return token_ids

    def _mark_of(self, match: re.Match[str]) -> str:
        return f"{self._mark}{self._texts.index(match[0])}\uf8d1"
