"""Workload: the prompts and lengths of a run; the same seed makes the same requests for every server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Lengths as of conversations with chat assistants: log-normal, medians and spreads of the order that ShareGPT's
# published statistics show (mean prompt about 220 tokens, mean answer about 200, both with long tails).
SHAREGPT_PROMPT = (90.0, 1.3)  # median tokens, sigma of the logarithm
SHAREGPT_OUTPUT = (140.0, 0.9)
SHAREGPT_LONGEST = (1024, 1024)


class WorkloadError(Exception):
    """The prompts can't be made as asked for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """text has num_tokens tokens by the given tokenizer, chat template not included; output_len = tokens asked for."""

    text: str
    num_tokens: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """kind: "random", "shared-prefix" or "sharegpt"; lengths in tokens."""

    kind: str
    num_prompts: int
    input_len: int
    output_len: int
    prefix_len: int = 0
    seed: int = 0
    dataset: Path | None = None

    def make(self, tokenizer: Tokenizer) -> list[Prompt]:
        generator = np.random.default_rng(self.seed)
        if self.kind == "sharegpt" and self.dataset is not None:
            return _from_dataset(self.dataset, self.num_prompts, tokenizer, generator)
        words = Words(tokenizer, generator)
        if self.kind == "sharegpt":
            lengths = _lengths(generator, self.num_prompts, SHAREGPT_PROMPT, SHAREGPT_LONGEST[0])
            outputs = _lengths(generator, self.num_prompts, SHAREGPT_OUTPUT, SHAREGPT_LONGEST[1])
            return [
                Prompt(words.text(int(length)), int(length), int(output))
                for length, output in zip(lengths, outputs, strict=True)
            ]
        prefix_len = self.prefix_len if self.kind == "shared-prefix" else 0
        prefix = words.text(prefix_len)
        return [
            Prompt(prefix + words.text(self.input_len), prefix_len + self.input_len, self.output_len)
            for _ in range(self.num_prompts)
        ]


class Words:
    """Random text with a known number of tokens: words that are one token each, whatever their neighbours are."""

    def __init__(self, tokenizer: Tokenizer, generator: np.random.Generator) -> None:
        self._generator = generator
        self._words = _single_token_words(tokenizer)
        if not self._words:
            raise WorkloadError("this tokenizer has no words of one token each: name another one by --tokenizer")
        sample = self.text(256)
        if len(tokenizer.encode(sample, add_special_tokens=False).ids) != 256:
            raise WorkloadError("this tokenizer joins words: texts of a known length can't be made with it")

    def text(self, num_tokens: int) -> str:
        return "".join(self._words[i] for i in self._generator.integers(len(self._words), size=num_tokens))


def _single_token_words(tokenizer: Tokenizer) -> Sequence[str]:
    texts = [tokenizer.decode([token_id]) for token_id in range(tokenizer.get_vocab_size())]
    words = sorted({text for text in texts if text.startswith(" ") and text[1:].isascii() and text[1:].islower()})
    encodings = tokenizer.encode_batch(words, add_special_tokens=False)
    found = [word for word, encoding in zip(words, encodings, strict=True) if len(encoding.ids) == 1]
    # A tiny vocabulary has no words; characters may do, if none of them joins the next.
    return found or _single_token_characters(tokenizer, texts)


def _single_token_characters(tokenizer: Tokenizer, texts: Sequence[str]) -> Sequence[str]:
    characters = sorted({text for text in texts if len(text) == 1 and text.isdecimal()})
    return [text for text in characters if len(tokenizer.encode(text * 3, add_special_tokens=False).ids) == 3]


def _lengths(
    generator: np.random.Generator, count: int, shape: tuple[float, float], longest: int
) -> npt.NDArray[np.int64]:
    median, sigma = shape
    drawn = generator.lognormal(np.log(median), sigma, size=count)
    return np.clip(np.rint(drawn), 4, longest).astype(np.int64)


def _from_dataset(path: Path, count: int, tokenizer: Tokenizer, generator: np.random.Generator) -> list[Prompt]:
    """First question and length of the first answer of random conversations in ShareGPT's JSON form."""
    try:
        conversations = [item["conversations"] for item in json.loads(path.read_text())]
        turns = [(talk[0]["value"], talk[1]["value"]) for talk in conversations if len(talk) >= 2]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise WorkloadError(f"{path} does not hold conversations in ShareGPT's form: {error!r}") from None
    prompts = []
    for i in generator.permutation(len(turns)):
        question, answer = turns[i]
        num_tokens = len(tokenizer.encode(question, add_special_tokens=False).ids)
        output_len = len(tokenizer.encode(answer, add_special_tokens=False).ids)
        if 4 <= num_tokens <= SHAREGPT_LONGEST[0] and 4 <= output_len <= SHAREGPT_LONGEST[1]:
            prompts.append(Prompt(question, num_tokens, output_len))
        if len(prompts) == count:
            return prompts
    raise WorkloadError(f"{path} has {len(prompts)} conversations of a fitting length, {count} are asked for")


def due_times(num_prompts: int, request_rate: float | None, seed: int) -> list[int]:
    """ns from the start: all 0 without a rate (closed loop), else Poisson arrivals at `request_rate` a second."""
    if request_rate is None:
        return [0] * num_prompts
    gaps_s = np.random.default_rng(seed + 1).exponential(1 / request_rate, size=num_prompts)
    return [int(due) for due in np.cumsum(gaps_s) * 1e9]
