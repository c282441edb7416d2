"""Vocabulary: everything text-shaped of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tokring.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Vocabulary(Protocol):
    """Tokenizer, chat templates and special tokens. Nothing is read before it is asked for: an engine asks for none."""

    def load_tokenizer(self) -> Tokenizer:
        """A fresh tokenizer, without truncation or padding. Raises CheckpointError."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources by name; "default" is the one to use if no other is asked for."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """What templates may name: "bos_token", "eos_token", "pad_token", "unk_token" as far as they exist."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, ascending."""
        ...

    @property
    def add_bos(self) -> bool:
        """Whether `encode(text)` with its default add_special_tokens=True begins with `bos_id`."""
        ...


def new_tokenizer(json_text: str, path: Path) -> Tokenizer:
    """The tokenizer that tokenizer.json's text describes; `path` is named in errors. Raises CheckpointError."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(json_text)
    except Exception as error:  # noqa: BLE001 - the library raises nothing more exact
        raise CheckpointError(path, f"is no usable tokenizer: {error}") from None
    # Both may be left over from training; a server must see every token of a prompt and no others.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
