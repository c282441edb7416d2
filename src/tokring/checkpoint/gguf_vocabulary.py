"""GgufVocabulary: a tokenizer built from a GGUF's tokens, merges or scores, and token types.

transformers' own GGUF conversion is no model: it needs torch and takes one pre-tokenizer for all (SmolLM's single
digits get lost). What is built here is the text of a tokenizer.json, so that it can be exported as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from tokring.checkpoint.errors import CheckpointError
from tokring.checkpoint.gguf_file import GgufFile
from tokring.checkpoint.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from tokring.checkpoint.sentencepiece_merges import merges_from_scores
from tokring.checkpoint.vocabulary import new_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

#: Control tokens that end a turn whatever the metadata calls them.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|turn_end|>"})

_SPACE = "\u2581"  # sentencepiece's mark for a space


class GgufVocabulary:
    """A Vocabulary of a GgufFile."""

    def __init__(self, file: GgufFile) -> None:
        self._path = file.path
        self._values = {
            key.removeprefix("tokenizer."): value
            for key, value in file.metadata.items()
            if key.startswith("tokenizer.")
        }

    def load_tokenizer(self) -> Tokenizer:
        return new_tokenizer(orjson.dumps(self.tokenizer_json()).decode(), self._path)

    def tokenizer_json(self) -> dict[str, Any]:
        """The object of a tokenizer.json. Raises CheckpointError for a kind of vocabulary that isn't known."""
        kind = self._text("ggml.model")
        if kind == "gpt2":
            parts = self._byte_level()
        elif kind == "llama":
            parts = self._sentencepiece()
        else:
            raise CheckpointError(
                self._path, f"has a tokenizer of kind {kind!r}; 'gpt2' (byte-level BPE) and 'llama' can be built"
            )
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            "post_processor": self._post_processor(),
            **parts,
        }

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        templates = {
            key.removeprefix("chat_template."): value
            for key, value in self._values.items()
            if key.startswith("chat_template.") and isinstance(value, str)
        }
        default = self._values.get("chat_template")
        return {**templates, "default": default} if isinstance(default, str) else templates

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        ids = {"bos": self.bos_id, "eos": self._id("eos"), "unk": self._id("unknown"), "pad": self._id("padding")}
        return {f"{name}_token": self._tokens[number] for name, number in ids.items() if number is not None}

    @cached_property
    def bos_id(self) -> int | None:
        return self._id("bos")

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        named = {self._id("eos"), self._id("eot"), self._id("eom")} - {None}
        by_text = {
            number for number in np.flatnonzero(self._types == _CONTROL).tolist() if self._tokens[number] in _TURN_ENDS
        }
        return tuple(sorted(number for number in named | by_text if number is not None))

    @cached_property
    def add_bos(self) -> bool:
        asked = self._values.get("ggml.add_bos_token")
        if asked is None:
            asked = self._text("ggml.model") == "llama" or self._pre_tokenizer.add_bos
        return asked is True and self.bos_id is not None

    @cached_property
    def _tokens(self) -> Sequence[str]:
        tokens = self._values.get("ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise CheckpointError(self._path, "has no tokenizer.ggml.tokens")
        return tokens

    @cached_property
    def _types(self) -> np.ndarray[Any, Any]:
        types = self._values.get("ggml.token_type")
        if types is None:
            return np.full(len(self._tokens), _NORMAL)
        return self._column("ggml.token_type", types)

    def _column(self, name: str, values: Any) -> np.ndarray[Any, Any]:
        if not isinstance(values, np.ndarray) or len(values) != len(self._tokens):
            raise CheckpointError(self._path, f"has no usable tokenizer.{name} for its {len(self._tokens)} tokens")
        return values

    def _merges(self) -> list[str] | None:
        """Pairs as "left right", best first; None if the file has none."""
        merges = self._values.get("ggml.merges")
        if merges is not None and not (isinstance(merges, list) and all(isinstance(merge, str) for merge in merges)):
            raise CheckpointError(self._path, "has no usable tokenizer.ggml.merges")
        return merges

    def _text(self, name: str) -> str:
        """A string of the metadata; "" if it is missing or no string."""
        value = self._values.get(name)
        return value if isinstance(value, str) else ""

    def _id(self, name: str) -> int | None:
        number = self._values.get(f"ggml.{name}_token_id")
        return number if type(number) is int and 0 <= number < len(self._tokens) else None

    @property
    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._text("ggml.pre")
        if name not in PRE_TOKENIZERS:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise CheckpointError(self._path, f"has the pre-tokenizer {name!r} (tokenizer.ggml.pre); known are {known}")
        return PRE_TOKENIZERS[name]

    def _vocabulary(self) -> dict[str, int]:
        """Token -> id without the unused ones; of two equal tokens the first counts."""
        vocabulary: dict[str, int] = {}
        unused = (self._types == _UNUSED).tolist()
        for number, token in enumerate(self._tokens):
            if not unused[number]:
                vocabulary.setdefault(token, number)
        return vocabulary

    def _added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that are cut out of the text before all else: control tokens (special), user-defined ones (not)."""
        cut_out = np.flatnonzero(np.isin(self._types, (_CONTROL, _USER_DEFINED)))
        return [
            {
                "id": number,
                "content": self._tokens[number],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": bool(self._types[number] == _CONTROL),
            }
            for number in cut_out.tolist()
        ]

    def _post_processor(self) -> dict[str, Any] | None:
        """BOS in front and EOS behind where the metadata ask for them."""
        eos = self._id("eos") if self._values.get("ggml.add_eos_token") is True else None
        ends = [(self.bos_id if self.add_bos else None, 0), (eos, 1)]
        if all(number is None for number, _ in ends):
            return None
        template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        special: dict[str, Any] = {}
        for number, place in ends:
            if number is None:
                continue
            token = self._tokens[number]
            template.insert(place * len(template), {"SpecialToken": {"id": token, "type_id": 0}})
            special[token] = {"id": token, "ids": [number], "tokens": [token]}
        pair = [*template, {"Sequence": {"id": "B", "type_id": 1}}]
        return {"type": "TemplateProcessing", "single": template, "pair": pair, "special_tokens": special}

    def _byte_level(self) -> dict[str, Any]:
        pre_tokenizer = self._pre_tokenizer
        merges = self._merges()
        if merges is None:
            raise CheckpointError(self._path, "has no tokenizer.ggml.merges")
        normalizer = pre_tokenizer.normalizer
        return {
            "normalizer": None if normalizer is None else {"type": normalizer},
            "pre_tokenizer": pre_tokenizer.to_json(),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": _bpe(self._vocabulary(), merges, ignore_merges=pre_tokenizer.ignore_merges),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        vocabulary = self._vocabulary()
        merges: Sequence[Any] | None = self._merges()
        if merges is None:
            scores = self._column("ggml.scores", self._values.get("ggml.scores"))
            merges = merges_from_scores(vocabulary, scores, self._types == _NORMAL)
        prefix = self._values.get("ggml.add_space_prefix", True) is True
        unknown = self._id("unknown")
        normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        model = _bpe(vocabulary, merges)
        model.update(byte_fallback=True, fuse_unk=True, unk_token=None if unknown is None else self._tokens[unknown])
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": model,
        }


def _bpe(vocabulary: dict[str, int], merges: Sequence[Any], *, ignore_merges: bool = False) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }
