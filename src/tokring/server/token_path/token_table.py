"""TokenTable: token id -> bytes, for tokenizers whose decoder is a pure function of each token."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer

Family = Literal["byte_level", "byte_fallback", "stream"]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
NUM_GATE_SEQUENCES = 200
MAX_GATE_SEQUENCE_TOKENS = 32


class TokenTable:
    """Bytes of every token id, and which family of decoders says so.

    family "byte_level": exact for every sequence of ids. "byte_fallback" (sentencepiece style): exact on valid text;
    broken runs of byte tokens become one U+FFFD per maximal subpart instead of one per byte of the whole run, which
    cannot be streamed. "stream": the decoder needs context; only ReferenceTokenPath serves it, by DecodeStream.
    """

    family: Family
    reason: str  # how the gate decided, for the log
    num_tokens: int  # ids in [0, num_tokens) may have bytes; all others have none
    data: bytes  # the bytes of all tokens, one after another
    offsets: npt.NDArray[np.uint32]  # [num_tokens + 1]: token i is data[offsets[i]:offsets[i + 1]]
    special: npt.NDArray[np.bool_]  # [num_tokens]: dropped when skip_special
    strips_leading_space: bool  # the decoder drops one space at the start of a whole text
    tokenizer: Tokenizer

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: Family,
        reason: str,
        token_bytes: Sequence[bytes],
        special_ids: Sequence[int],
        strips_leading_space: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self.reason = reason
        self.num_tokens = len(token_bytes)
        self.data = b"".join(token_bytes)
        self.offsets = np.zeros(self.num_tokens + 1, dtype=np.uint32)
        np.cumsum([len(token) for token in token_bytes], out=self.offsets[1:])
        self.special = np.zeros(self.num_tokens, dtype=np.bool_)
        self.special[[token_id for token_id in special_ids if token_id < self.num_tokens]] = True
        self.strips_leading_space = strips_leading_space

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TokenTable:
        """The table of `tokenizer`, checked against its own decode(): every id, and random sequences.

        Takes 50 ms to 1.5 s by vocabulary. Never refuses: what fails the check gets family "stream".
        """
        description = orjson.loads(tokenizer.to_str())
        special_ids = [entry["id"] for entry in description.get("added_tokens") or [] if entry["special"]]
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        decoders = _decoder_chain(description.get("decoder"))
        kinds = [decoder["type"] for decoder in decoders]
        if kinds == ["ByteLevel"]:
            table = cls(tokenizer, "byte_level", "", _byte_level_bytes(vocabulary), special_ids)
        elif kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
            strips = kinds[-1] == "Strip"
            token_bytes = _byte_fallback_bytes(vocabulary, decoders[0])
            table = cls(tokenizer, "byte_fallback", "", token_bytes, special_ids, strips)
        else:
            return cls._stream(tokenizer, vocabulary, special_ids, f"decoder {'+'.join(kinds) or 'none'} needs context")
        failure = table._mismatch(vocabulary)
        if failure:
            return cls._stream(tokenizer, vocabulary, special_ids, failure)
        table.reason = f"decoder {'+'.join(kinds)} is a pure table; checked on {len(vocabulary)} ids and random text"
        return table

    @classmethod
    def _stream(
        cls, tokenizer: Tokenizer, vocabulary: Mapping[str, int], special_ids: Sequence[int], reason: str
    ) -> TokenTable:
        """Bytes of single tokens are then for display in logprobs only."""
        num_tokens = max(vocabulary.values(), default=-1) + 1
        texts = tokenizer.decode_batch([[token_id] for token_id in range(num_tokens)], skip_special_tokens=False)
        return cls(tokenizer, "stream", reason, [text.encode() for text in texts], special_ids)

    def bytes_of(self, token_id: int) -> bytes:
        """b"" for ids outside the vocabulary (padded embeddings)."""
        if not 0 <= token_id < self.num_tokens:
            return b""
        return self.data[self.offsets[token_id] : self.offsets[token_id + 1]]

    def is_special(self, token_id: int) -> bool:
        return 0 <= token_id < self.num_tokens and bool(self.special[token_id])

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of a whole sequence, as the token paths stream it."""
        kept = (token_id for token_id in token_ids if not (skip_special and self.is_special(token_id)))
        return b"".join(map(self.bytes_of, kept)).decode("utf-8", "replace")

    def _mismatch(self, vocabulary: Mapping[str, int]) -> str:
        """Why decode() disagrees with the table; "" if it does not."""
        ids = sorted(vocabulary.values())
        anchor = next((vocabulary[letter] for letter in "aeA1" if letter in vocabulary), None)
        if anchor is None:
            return "no one-letter token to check the table with"
        before = self.bytes_of(anchor).decode()  # not a byte token: a run of those would begin with it
        texts = self.tokenizer.decode_batch([[anchor, token_id] for token_id in ids], skip_special_tokens=False)
        offsets = self.offsets.tolist()  # a numpy scalar costs more than all the rest of a comparison
        for token_id, text in zip(ids, texts, strict=True):
            if text != before + self.data[offsets[token_id] : offsets[token_id + 1]].decode("utf-8", "replace"):
                return (
                    f"token {token_id} decodes to {text[len(before) :]!r}, the table says {self.bytes_of(token_id)!r}"
                )
        for sequence in self._gate_sequences(ids):
            expected = self.tokenizer.decode(sequence, skip_special_tokens=True)
            found = self.decode(sequence, skip_special=True)
            if self.strips_leading_space:
                found = found.removeprefix(" ")
            if found != expected:
                return f"ids {sequence[:8]} decode to {expected[:40]!r}, the table says {found[:40]!r}"
        return ""

    def _gate_sequences(self, ids: Sequence[int]) -> list[list[int]]:
        """Random ids; for byte fallback only of tokens that are whole characters (see the class docstring)."""
        generator = random.Random(0)
        if self.family == "byte_fallback":
            ids = [token_id for token_id in ids if _is_utf8(self.bytes_of(token_id))]
        lengths = (generator.randint(1, MAX_GATE_SEQUENCE_TOKENS) for _ in range(NUM_GATE_SEQUENCES))
        return [generator.choices(ids, k=length) for length in lengths]


def _decoder_chain(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_level_bytes(vocabulary: Mapping[str, int]) -> list[bytes]:
    """GPT-2's printable alphabet back to bytes; a token with any other character is its own UTF-8, as in decode()."""
    alphabet = _Alphabet((ord(character), byte) for character, byte in byte_alphabet().items())
    token_bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        try:
            token_bytes[token_id] = token.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:
            token_bytes[token_id] = token.encode("utf-8", "replace")
    return token_bytes


class _Alphabet(dict[int, int]):
    """For str.translate: characters to bytes, and all others to one that latin-1 refuses."""

    def __missing__(self, character: int) -> int:
        return 0xFFFD


def _byte_fallback_bytes(vocabulary: Mapping[str, int], replace: Mapping[str, Any]) -> list[bytes]:
    pattern, content = replace["pattern"].get("String"), replace["content"]
    token_bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        match = BYTE_TOKEN.fullmatch(token)
        text = token.replace(pattern, content) if pattern else token
        token_bytes[token_id] = bytes([int(match[1], 16)]) if match else text.encode("utf-8", "replace")
    return token_bytes


def byte_alphabet() -> dict[str, int]:
    """GPT-2's map of printable characters to bytes: printable ones stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
