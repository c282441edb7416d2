"""What has been vetted once stays so when the engine has died, and nothing that a dying engine spoils is believed."""

import mmap
import os

import pytest

from tests.engine.test_grammar import GrammarHarness, error
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer_json
from tokring import vetted_grammars
from tokring.engine.grammar import GrammarTokenizer
from tokring.engine.grammar_compiler import GrammarCompiler
from tokring.engine.grammar_text import GrammarError, GrammarUnavailableError
from tokring.vetted_grammars import ENTRY, HEADER, NUM_BYTES, VettedGrammars
from tokring_ipc import ErrorCode, ExtensionKind, FinishReason

REGEX = ExtensionKind.GRAMMAR_REGEX


@pytest.fixture
def fd():
    fd = vetted_grammars.create()
    yield fd
    os.close(fd)


def test_the_next_engine_finds_what_the_last_one_found(fd):
    first = VettedGrammars(fd)
    first.add(1, b"a", "grammar a")
    first.add(2, b"a", "grammar ä")
    first.add(1, b"a", "not this one")
    later = VettedGrammars(fd)
    assert (later.get(1, b"a"), later.get(2, b"a"), later.get(1, b"b")) == ("grammar a", "grammar ä", None)
    later.add(3, b"c", "grammar c")
    assert len(VettedGrammars(fd)) == 3


@pytest.mark.parametrize("spoilt", [0, HEADER.size + ENTRY.size + len("first") + 2, HEADER.size + ENTRY.size])
def test_spoilt_memory_is_not_believed(fd, spoilt):
    table = VettedGrammars(fd)
    table.add(1, b"a", "first")
    table.add(1, b"b", "second")
    with mmap.mmap(fd, NUM_BYTES) as memory:
        memory[spoilt] ^= 0xFF
        later = VettedGrammars(fd)
        assert later.get(1, b"a") in ("first", None) and later.get(1, b"b") in ("second", None)
        if spoilt:
            assert len(later) == (1 if spoilt > HEADER.size + ENTRY.size + 5 else 0)
        memory[: HEADER.size] = b"\xff" * HEADER.size
        VettedGrammars(fd).add(1, b"c", "third")
        assert VettedGrammars(fd).get(1, b"c") is not None or spoilt == 0


def test_a_full_table_begins_anew(fd):
    table = VettedGrammars(fd)
    large = "x" * (5 << 20)
    for number in range(4):
        table.add(number, b"", large)
    assert [table.get(number, b"") is not None for number in range(4)] == [False, False, False, True]
    assert len(VettedGrammars(fd)) == 1
    table.add(9, b"", "x" * NUM_BYTES)  # would never fit
    assert table.get(9, b"") is None


@pytest.fixture(scope="module")
def tokenizer():
    return GrammarTokenizer(tiny_tokenizer_json(), VOCAB_SIZE, [EOS_ID])


def test_a_request_of_the_last_engine_is_not_vetted_again(tokenizer, fd, monkeypatch):
    for is_second in (False, True):
        compiler = GrammarCompiler(tokenizer, VettedGrammars(fd))
        if is_second:
            monkeypatch.setattr(compiler._vetting, "check", lambda *job: pytest.fail("vetted again"))
        engine = GrammarHarness(compiler)
        try:
            stream = engine.constrained(REGEX, "[0-9]{4}")
            engine.finish()
        finally:
            compiler.close()
        assert stream.reason == FinishReason.STOP


@pytest.mark.parametrize(
    ("failure", "code", "why"),
    [
        (GrammarError("wrong"), ErrorCode.GRAMMAR, "wrong"),
        (GrammarUnavailableError("too busy"), ErrorCode.OVERLOADED, "its constraint could not be tried: too busy"),
    ],
)
def test_a_busy_machine_is_not_the_grammars_fault(tokenizer, monkeypatch, failure, code, why):
    compiler = GrammarCompiler(tokenizer)

    def check(*_):
        raise failure

    monkeypatch.setattr(compiler._vetting, "check", check)
    engine = GrammarHarness(compiler)
    stream = engine.constrained(REGEX, "[0-9]{4}")
    engine.finish()
    compiler.close()
    assert error(stream) == code
    [front_end] = engine.core.front_ends.values()
    assert front_end.explain(int(stream.finish["stream_slot"]), int(stream.finish["slot_generation"])) == why
