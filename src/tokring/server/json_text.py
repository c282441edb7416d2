"""Decoding JSON that clients send: what is nested too deeply or has too many parts is refused before it is built."""

import re
from itertools import accumulate
from typing import Any

import orjson

# Far above any request, and low enough for what recurses into the values: orjson's writer (254), Jinja, our own code.
MAX_NESTING = 128
# A list or object costs a hundred times its two bytes; a body of nothing else would hold up the event loop for seconds.
MAX_CONTAINERS = 200_000
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\x00\x00")


class JsonError(ValueError):
    """The text is no JSON, or more of it than is accepted; the message is fit for the client."""


def load_json(text: bytes | str) -> Any:
    """The value. Raises JsonError."""
    data = text.encode() if isinstance(text, str) else text
    _check_structure(data)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise JsonError(f"not valid JSON: {error}") from None


def _check_structure(data: bytes) -> None:
    """Brackets within strings do not count; text that is no JSON at all is left to the parser."""
    if data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return
    brackets = _STRING.sub(b"", data).translate(_STEPS, _ALL_BUT_BRACKETS)
    if brackets.count(1) > MAX_CONTAINERS:
        raise JsonError(f"made of more than {MAX_CONTAINERS} lists and objects")
    if max(accumulate(2 * step - 1 for step in brackets), default=0) > MAX_NESTING:
        raise JsonError(f"nested deeper than {MAX_NESTING}")
