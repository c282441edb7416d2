"""Reading of JSON files whose content is not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokring.checkpoint.errors import CheckpointError


def read_text(path: Path) -> str:
    """The whole file as UTF-8. Raises CheckpointError."""
    text = read_optional_text(path)
    if text is None:
        raise CheckpointError(path, "does not exist")
    return text


def read_optional_text(path: Path) -> str | None:
    """The whole file as UTF-8, None if there is no such file. Raises CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(path, f"can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"is not UTF-8 text: {error}") from None


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """`text` as a JSON object; `path` is named in errors. Raises CheckpointError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"holds a JSON {type(value).__name__}, an object is needed")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises CheckpointError."""
    return parse_object(read_text(path), path)


def read_optional_object(path: Path) -> dict[str, Any]:
    """As `read_object`, {} if there is no such file."""
    text = read_optional_text(path)
    return {} if text is None else parse_object(text, path)
