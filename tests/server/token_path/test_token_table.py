import random

import pytest
from tokenizers import Tokenizer

from tokring.server.token_path import TokenTable


def random_ids(generator: random.Random, num_ids: int) -> list[int]:
    return [generator.randrange(num_ids) for _ in range(generator.randint(1, 40))]


@pytest.mark.parametrize("skip_special", [False, True])
def test_byte_level_table_equals_decode_on_any_ids_broken_characters_included(
    byte_level_tokenizer: Tokenizer, skip_special: bool
) -> None:
    table = TokenTable.from_tokenizer(byte_level_tokenizer)
    assert table.family == "byte_level"
    generator = random.Random(1)
    for _ in range(500):
        ids = random_ids(generator, table.num_tokens)
        expected = byte_level_tokenizer.decode(ids, skip_special_tokens=skip_special)
        assert table.decode(ids, skip_special=skip_special) == expected


def test_byte_fallback_table_equals_decode_on_text(byte_fallback_tokenizer: Tokenizer) -> None:
    table = TokenTable.from_tokenizer(byte_fallback_tokenizer)
    assert table.family == "byte_fallback" and table.strips_leading_space
    for text in ["the cat sat", " the  cat: 日本 and the 語 😀!", "naïve\n\ttext"]:
        ids = byte_fallback_tokenizer.encode(text, add_special_tokens=False).ids
        assert byte_fallback_tokenizer.decode(ids) == text.removeprefix(" ")
        assert table.decode(ids, skip_special=True) == text


def test_a_decoder_that_needs_context_is_left_to_the_streaming_family(metaspace_tokenizer: Tokenizer) -> None:
    table = TokenTable.from_tokenizer(metaspace_tokenizer)
    assert table.family == "stream"
    assert "Metaspace" in table.reason


def test_the_gate_refuses_a_table_that_disagrees_with_decode(byte_level_tokenizer: Tokenizer) -> None:
    from tokenizers import decoders

    tokenizer = Tokenizer.from_str(byte_level_tokenizer.to_str())
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("a", "b"), decoders.ByteFallback(), decoders.Fuse()]  # the byte alphabet stays undecoded
    )
    table = TokenTable.from_tokenizer(tokenizer)
    assert table.family in ("stream", "byte_fallback")
    for text in ("the cat", "a man"):
        ids = tokenizer.encode(text).ids
        if table.family == "byte_fallback":
            assert table.decode(ids, skip_special=True) == tokenizer.decode(ids)


def test_ids_outside_the_vocabulary_have_no_bytes(byte_level_tokenizer: Tokenizer) -> None:
    table = TokenTable.from_tokenizer(byte_level_tokenizer)
    assert table.bytes_of(table.num_tokens) == table.bytes_of(-1) == table.bytes_of(2**31 - 1) == b""
    assert not table.is_special(table.num_tokens)


def test_special_tokens_are_those_marked_special(byte_level_tokenizer: Tokenizer) -> None:
    table = TokenTable.from_tokenizer(byte_level_tokenizer)
    assert table.is_special(byte_level_tokenizer.token_to_id("<|two words|>"))
    assert not table.is_special(byte_level_tokenizer.token_to_id("<tool call>"))
    assert table.bytes_of(byte_level_tokenizer.token_to_id("<|日本|>")) == "<|日本|>".encode()
