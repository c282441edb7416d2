"""HfVocabulary: tokenizer.json, tokenizer_config.json and chat templates of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokring.checkpoint.errors import CheckpointError
from tokring.checkpoint.json_file import parse_object, read_optional_object, read_optional_text, read_text
from tokring.checkpoint.vocabulary import new_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class HfVocabulary:
    """A Vocabulary of a directory. `model_config` is config.json's object ({} if there is none)."""

    def __init__(self, directory: Path, model_config: Mapping[str, Any]) -> None:
        self._directory = directory
        self._model_config = model_config
        self._settings = read_optional_object(directory / "tokenizer_config.json")

    def load_tokenizer(self) -> Tokenizer:
        path = self._directory / "tokenizer.json"
        text = read_optional_text(path)
        if text is None:
            raise CheckpointError(self._directory, "has no tokenizer.json")
        tokenizer = new_tokenizer(text, path)
        self._apply_end_tokens(tokenizer)
        return tokenizer

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        templates = self._templates_in_settings()
        for path in sorted((self._directory / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = read_text(path)
        default = read_optional_text(self._directory / "chat_template.jinja")
        if default is not None:  # a file of its own goes before tokenizer_config.json, as in transformers
            templates["default"] = default
        return templates

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        settings = {**read_optional_object(self._directory / "special_tokens_map.json"), **self._settings}
        tokens = {name: _token_text(settings.get(name)) for name in SPECIAL_TOKEN_NAMES}
        return {name: text for name, text in tokens.items() if text is not None}

    @property
    def bos_id(self) -> int | None:
        text = self.special_tokens.get("bos_token")
        if text is not None:
            return self._tokenizer.token_to_id(text)
        bos = self._model_config.get("bos_token_id")
        return bos if type(bos) is int else None

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        path = self._directory / "generation_config.json"
        listed = read_optional_object(path).get("eos_token_id")
        if listed is None:
            listed = self._model_config.get("eos_token_id")
        ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
        if any(type(number) is not int or number < 0 for number in ids):
            raise CheckpointError(path, f"eos_token_id is {listed!r}, needed is a token id or a list of them")
        text = self.special_tokens.get("eos_token")
        turn_end = None if text is None else self._tokenizer.token_to_id(text)
        return tuple(sorted({*ids} | ({turn_end} if turn_end is not None else set())))

    @cached_property
    def add_bos(self) -> bool:
        ids = self._tokenizer.encode("a").ids
        return self.bos_id is not None and ids[:1] == [self.bos_id]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.load_tokenizer()

    def _apply_end_tokens(self, tokenizer: Tokenizer) -> None:
        """tokenizer_config.json's add_bos_token and add_eos_token, if written down, overrule tokenizer.json."""
        wanted = {"bos_token": self._settings.get("add_bos_token"), "eos_token": self._settings.get("add_eos_token")}
        if all(value is None for value in wanted.values()):
            return
        from tokenizers.processors import TemplateProcessing

        ends: dict[str, tuple[str, int]] = {}
        for name, value in wanted.items():
            text = self.special_tokens.get(name)
            number = None if text is None or value is not True else tokenizer.token_to_id(text)
            if text is not None and number is not None:
                ends[name] = (text, number)
        template = [f"{ends['bos_token'][0]}:0"] if "bos_token" in ends else []
        template += ["$A:0"]
        template += [f"{ends['eos_token'][0]}:0"] if "eos_token" in ends else []
        tokenizer.post_processor = TemplateProcessing(
            single=template, pair=[*template, "$B:1"], special_tokens=list(ends.values())
        )

    def _templates_in_settings(self) -> dict[str, str]:
        """tokenizer_config.json's chat_template: a string, or a list of {"name", "template"}."""
        template = self._settings.get("chat_template")
        entries = [{"name": "default", "template": template}] if isinstance(template, str) else template or []
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in entries}
        except (TypeError, KeyError):
            path = self._directory / "tokenizer_config.json"
            raise CheckpointError(
                path, "has a chat_template that is neither a string nor a list of named ones"
            ) from None


def read_generation_defaults(directory: Path) -> Mapping[str, float | int]:
    """The sampling numbers of generation_config.json under Hugging Face's names. Raises CheckpointError."""
    config = read_optional_object(directory / "generation_config.json")
    return {name: config[name] for name in _SAMPLING_NAMES if type(config.get(name)) in (int, float)}


_SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def read_model_config(directory: Path) -> dict[str, Any]:
    """config.json. Raises CheckpointError."""
    path = directory / "config.json"
    text = read_optional_text(path)
    if text is None:
        raise CheckpointError(directory, "has no config.json and no GGUF: not a model directory")
    return parse_object(text, path)


def _token_text(token: Any) -> str | None:
    """A special token is written as its text or as {"content": text, ...}."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
