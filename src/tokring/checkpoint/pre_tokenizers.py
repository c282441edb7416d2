"""The table over `tokenizer.ggml.pre`: how a byte-level BPE vocabulary cuts text before it merges.

A GGUF names its pre-tokenizer and nothing else, so the patterns have to be known; they are those of the models' own
tokenizer.json files. A name that isn't here is refused: guessing would give wrong ids without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns that isolate their matches one after the other, then GPT-2's own pattern if `gpt2`."""

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False
    normalizer: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False

    def to_json(self) -> dict[str, Any]:
        """tokenizer.json's "pre_tokenizer"."""
        steps: list[dict[str, Any]] = []
        if self.digits:
            steps.append({"type": "Digits", "individual_digits": True})
        for pattern in self.patterns:
            steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": self.gpt2})
        return {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]


_GPT2 = PreTokenizer(gpt2=True)
_DIGITS_GPT2 = PreTokenizer(digits=True, gpt2=True)
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_LIKE = PreTokenizer((_LLAMA3,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(["gpt-2", "phi-2", "mpt", "jais", "trillion", "roberta-bpe", "gigachat"], _GPT2),
    **dict.fromkeys(["olmo"], PreTokenizer(gpt2=True, normalizer="NFC")),
    **dict.fromkeys(["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], _DIGITS_GPT2),
    **dict.fromkeys(["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "midm-2.0"], _LLAMA_BPE),
    **dict.fromkeys(["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], _LLAMA3_LIKE),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "megrez"], PreTokenizer((_QWEN2,), normalizer="NFC")),
    **dict.fromkeys(["stablelm2", "hunyuan"], PreTokenizer((_QWEN2,))),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
}
