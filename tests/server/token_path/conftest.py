"""Tokenizers small enough to train in a test, and every implementation of the token path."""

from collections.abc import Callable, Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tokring.server.token_path import NativeTokenPath, ReferenceTokenPath, TokenPath, TokenTable

CORPUS = [
    "the cat sat on the mat and the dog ran to the man",
    'she said: "hello, world"\n\tand left \\ the room.\n\nEND',
    "日本語のテキスト 中文文本 한국어 émoji 😀👍🏽 naïve café",
] * 8


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|two words|>", "<|日本|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>"])
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> Tokenizer:
    """As sentencepiece exports look: U+2581 for spaces, <0xNN> for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,:!", "▁the", "▁cat", "▁sat", "th", "he", "at", "日", "本", "▁▁"]
    tokenizer = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def metaspace_tokenizer() -> Tokenizer:
    """A decoder that needs context: no table."""
    pieces = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz", "▁the", "▁cat"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.fixture(scope="session")
def table(byte_level_tokenizer: Tokenizer) -> TokenTable:
    return TokenTable.from_tokenizer(byte_level_tokenizer)


IMPLEMENTATIONS: list[type[TokenPath]] = [ReferenceTokenPath, NativeTokenPath]
MakePath = Callable[..., TokenPath]


@pytest.fixture(params=IMPLEMENTATIONS, ids=["reference", "native"])
def make_path(request: pytest.FixtureRequest, table: TokenTable) -> Iterator[MakePath]:
    """Builds a token path of either kind; all are released after the test."""
    made: list[TokenPath] = []

    def make(num_stream_slots: int = 8, **options: object) -> TokenPath:
        made.append(request.param(table, num_stream_slots, **options))
        return made[-1]

    yield make
    for path in made:
        path.release()
