"""Decoding JSON that clients send: what is nested too deeply or has too many parts is refused before it is built."""

from typing import Any

import orjson

from tokring.server.token_path import json_shape

# Far above any request, and low enough for what recurses into the values: orjson's writer (254), Jinja, our own code.
MAX_NESTING = 128
# A list or object costs a hundred times its two bytes, a string ten times its three; a body of nothing else would hold
# up the event loop for seconds.
MAX_CONTAINERS = 200_000
MAX_STRINGS = 200_000
MAX_VALUES = 500_000


class JsonError(ValueError):
    """The text is no JSON, or more of it than is accepted; the message is fit for the client."""


def load_json(text: bytes | str) -> Any:
    """The value. Raises JsonError."""
    data = text.encode() if isinstance(text, str) else text
    check_json_shape(data)
    return load_checked_json(data)


def load_checked_json(data: bytes) -> Any:
    """Of a text that check_json_shape() has accepted. Raises JsonError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise JsonError(f"not valid JSON: {error}") from None


def check_json_shape(data: bytes) -> None:
    """Raises JsonError for more than the bounds. Without the GIL, a millisecond per megabyte: good for a thread."""
    depth, num_containers, num_strings, num_commas = json_shape(data)
    if num_containers > MAX_CONTAINERS:
        raise JsonError(f"made of more than {MAX_CONTAINERS} lists and objects")
    if num_strings > MAX_STRINGS:
        raise JsonError(f"made of more than {MAX_STRINGS} strings")
    if num_commas >= MAX_VALUES:
        raise JsonError(f"made of more than {MAX_VALUES} values")
    if depth > MAX_NESTING:
        raise JsonError(f"nested deeper than {MAX_NESTING}")
