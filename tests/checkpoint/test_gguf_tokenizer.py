"""Tokenizers built from GGUF metadata."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.support.tiny_gguf import close, write_metadata, write_tiny_gguf, write_tiny_vocabulary
from tests.support.tiny_hf import LLAMA, random_weights
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer, tiny_vocabulary
from tokenizers import Regex, pre_tokenizers

from tokring.checkpoint import CheckpointError, open_checkpoint
from tokring.checkpoint.pre_tokenizers import PRE_TOKENIZERS

TEXTS = [
    "",
    " leading and trailing ",
    "The year 2024, and\n  3 more: 1234567.",
    "don't WE'LL they'Re",
    "héllo wörld ÅÅ 你好，世界。カタカナ 🦊🦊🏽 \u0000 \u2028 x\t\t\n\n\n  y",
    "<|im_start|>user\nHi<|im_end|>\n<|im_end|",
    "def f(x):\n    return x**2  # ok?!...\r\n\r\n",
]


def write_vocabulary(path: Path, pre: str = "smollm", **fields: Any) -> Path:
    """A GGUF of a tiny Llama with one tensor; `fields` are more metadata under tokenizer.ggml."""
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, LLAMA)
    write_tiny_vocabulary(writer, pre)
    for name, value in fields.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", random_weights(LLAMA)["model.embed_tokens.weight"])
    close(writer)
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_original_tokenizer(tmp_path: Path, text: str) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    built, original = open_checkpoint(str(tmp_path)).load_tokenizer(), tiny_tokenizer()
    ids = built.encode(text).ids
    assert ids == original.encode(text).ids
    assert built.decode(ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    tokens, merges = tiny_vocabulary()
    tokens.append("[PAD400]")
    types = [int(gguf.TokenType.NORMAL)] * len(tokens)
    types[1], types[2], types[-1] = (int(t) for t in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, 5))
    path = write_sentences(tmp_path / "x.gguf", "gpt2", tokens, types, merges=merges, pre="smollm")
    tokenizer = open_checkpoint(str(path)).load_tokenizer()
    assert {number: token.special for number, token in tokenizer.get_added_tokens_decoder().items()} == {
        1: True,
        2: False,
    }
    assert tokenizer.encode("a<|im_start|><|im_end|>").ids[1:] == [1, 2]
    assert tokenizer.decode([1, 2]) == "<|im_end|>"
    assert tokenizer.id_to_token(len(tokens) - 1) is None, "an unused token is not part of the vocabulary"


def test_bos_and_eos_are_added_where_the_metadata_ask_for_it(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "x.gguf", bos_token_id=1, add_bos_token=True, add_eos_token=True)
    checkpoint = open_checkpoint(str(path))
    plain = tiny_tokenizer().encode("here").ids
    assert checkpoint.add_bos and checkpoint.bos_id == 1
    assert checkpoint.load_tokenizer().encode("here").ids == [1, *plain, 2]
    assert checkpoint.load_tokenizer().encode("here", add_special_tokens=False).ids == plain


def test_llama_bpe_adds_bos_unless_told_otherwise(tmp_path: Path) -> None:
    assert open_checkpoint(str(write_vocabulary(tmp_path / "a.gguf", "llama-bpe", bos_token_id=1))).add_bos
    path = write_vocabulary(tmp_path / "b.gguf", "llama-bpe", bos_token_id=1, add_bos_token=False)
    assert not open_checkpoint(str(path)).add_bos


def test_end_of_turn_tokens_are_eos_ids_too(tmp_path: Path) -> None:
    # 2 is <|im_end|>, a control token that ends turns whatever the metadata say.
    path = write_vocabulary(tmp_path / "x.gguf", eot_token_id=7, eom_token_id=0)
    assert open_checkpoint(str(path)).eos_ids == (0, 2, 7)


def test_chat_template_and_special_tokens_are_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_vocabulary(tmp_path / "x.gguf", bos_token_id=1, padding_token_id=0)))
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "x.gguf", "martian")
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(CheckpointError, match=r"x\.gguf: has the pre-tokenizer 'martian'.*smollm"):
        checkpoint.load_tokenizer()


def pieces(pre: str, text: str) -> list[str]:
    """How the named pre-tokenizer cuts `text`; the byte-level step that follows only renames bytes."""
    entry = PRE_TOKENIZERS[pre]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if entry.digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in entry.patterns]
    steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=entry.gpt2)]
    cut = pre_tokenizers.Sequence(steps).pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in cut]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_every_character(tmp_path: Path, pre: str) -> None:
    path = write_vocabulary(tmp_path / "x.gguf", pre, add_bos_token=False)
    tokenizer = open_checkpoint(str(path)).load_tokenizer()
    for text in TEXTS:
        text = text.replace("ÅÅ", "Å")  # some normalize
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "in 2024 don't", ["in", " 2024", " don", "'t"]),
        ("smollm", "in 2024", ["in", " ", "2", "0", "2", "4"]),
        ("smollm", "\n  3", ["\n  ", "3"]),
        ("llama-bpe", "x 12345 WE'LL\n\n", ["x", " ", "123", "45", " WE", "'LL", "\n\n"]),
        ("qwen2", "x 12345 WE'LL", ["x", " ", "1", "2", "3", "4", "5", " WE", "'LL"]),
        ("deepseek-coder", "a 你好 12\n", ["a", " ", "你好", " ", "1", "2", "\n"]),
        ("deepseek-llm", "ab 你好 12\n", ["ab", " ", "你好", " ", "1", "2", "\n"]),
        ("deepseek-v3", "ab 1234你好", ["ab", " ", "123", "4", "你好"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
    ],
)
def test_pre_tokenizers_cut_as_their_models_do(pre: str, text: str, expected: Sequence[str]) -> None:
    assert pieces(pre, text) == expected


def write_sentences(
    path: Path,
    model: str,
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    scores: Sequence[float] | None = None,
    merges: Sequence[str] | None = None,
    pre: str | None = None,
    **fields: Any,
) -> Path:
    """A GGUF with a given vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, LLAMA)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if scores is not None:
        writer.add_token_scores(list(scores))
    if merges is not None:
        writer.add_token_merges(list(merges))
    for name, value in fields.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 64), np.float32))
    close(writer)
    return path


SENTENCEPIECE = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "ld", "▁wor"]


@pytest.fixture
def sentencepiece_gguf(tmp_path: Path) -> Path:
    tokens = [*SENTENCEPIECE, *PIECES]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * len(SENTENCEPIECE) + [-float(rank) for rank in range(len(PIECES))]
    return write_sentences(
        tmp_path / "x.gguf", "llama", tokens, types, scores=scores, bos_token_id=1, eos_token_id=2, unknown_token_id=0
    )


def test_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(sentencepiece_gguf: Path) -> None:
    checkpoint = open_checkpoint(str(sentencepiece_gguf))
    tokenizer = checkpoint.load_tokenizer()
    encoding = tokenizer.encode("hello world é")
    assert encoding.tokens == ["<s>", "▁hello", "▁wor", "ld", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoding.ids) == "hello world é"
    assert checkpoint.add_bos and checkpoint.eos_ids == (2,)
    assert checkpoint.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_other_kinds_of_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    path = write_sentences(tmp_path / "x.gguf", "bert", ["a"], [1])
    with pytest.raises(CheckpointError, match="'bert'"):
        open_checkpoint(str(path)).load_tokenizer()
