"""Grammars that are malformed, endless or too large: refused by the process that vets them, at nobody else's cost."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from tests.engine.test_grammar import GrammarHarness, error
from tests.support.serving import wait_until
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer_json
from tokring.engine.grammar import Grammar, GrammarTokenizer
from tokring.engine.grammar_compiler import GrammarCompiler
from tokring.engine.grammar_text import MAX_GRAMMAR_BYTES, GrammarError, GrammarUnavailableError
from tokring.engine.grammar_vetting import Vetting
from tokring_ipc import ErrorCode, ExtensionKind, FinishReason

SCHEMA = ExtensionKind.GRAMMAR_JSON_SCHEMA
PATIENCE_S = 280.0
REGEX = ExtensionKind.GRAMMAR_REGEX
EBNF = ExtensionKind.GRAMMAR_EBNF
TAG = ExtensionKind.GRAMMAR_STRUCTURAL_TAG


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine a bomb needs longer than clients are kept waiting to spend the CPU time that convicts it."""
    monkeypatch.setattr("tokring.engine.grammar_vetting.WAIT_LIMIT_S", PATIENCE_S)


@pytest.fixture(scope="module")
def tokenizer():
    return GrammarTokenizer(tiny_tokenizer_json(), VOCAB_SIZE, [EOS_ID])


@pytest.fixture(scope="module")
def vetting(tokenizer):
    vetting = Vetting(tokenizer)
    yield vetting
    vetting.close()


def bytes_of(name):
    kind, text = BOMBS[name]
    return kind, (text if isinstance(text, str) else json.dumps(text)).encode()


def check(vetting, kind, text):
    return vetting.check(kind, (text if isinstance(text, str) else json.dumps(text)).encode())


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BOMBS = {
    "a megabyte": (EBNF, 'start: "' + "a" * 1_000_000 + '"'),
    "a schema that is itself": (SCHEMA, {"$ref": "#"}),
    "a circle of references": (
        SCHEMA,
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ),
    "a circle through allOf": (SCHEMA, {"allOf": [{"$ref": "#"}, {"type": "object"}]}),
    "deep nesting": (SCHEMA, nested(400)),
    "a product of alternatives": (
        SCHEMA,
        {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"k{i}{j}": {"type": "string"}}} for j in range(6)]}
                for i in range(10)
            ]
        },
    ),
    "a regex of nested counts": (REGEX, "(([a-z]{1,100}){1,100}){1,100}"),
    "parentheses": (REGEX, "(" * 2000 + "a" + ")" * 2000),
    "parentheses in a grammar": (EBNF, "start: " + "(" * 20000 + '"a"' + ")" * 20000),
    "a rule that never ends": (EBNF, 'start: a\na: "x" a\n'),
    "a huge multiple": (SCHEMA, {"type": "integer", "multipleOf": 999983}),
}
MALFORMED = {
    "a type that is none": (SCHEMA, {"type": "banana"}),
    "not JSON": (SCHEMA, "{"),
    "nothing satisfies it": (SCHEMA, {"type": "string", "minLength": 5, "maxLength": 2}),
    "a keyword that is not supported": (
        SCHEMA,
        {"type": "object", "properties": {"s": {"not": {}}}, "required": ["s"]},
    ),
    "a bracket": (REGEX, "["),
    "look-ahead": (REGEX, "(?!abc)[a-z]+"),
    "an unknown rule": (EBNF, "start: foo\n"),
    "no rules at all": (EBNF, "???"),
    "no list of choices": (ExtensionKind.GRAMMAR_CHOICE, '{"a": 1}'),
    "a tag without triggers": (TAG, {"structures": [{"begin": "<f>", "end": "</f>"}], "triggers": []}),
    "a tag of another shape": (TAG, {"format": {"type": "sequence"}}),
    "a list for a tag": (TAG, [1]),
    "a number for a format": (TAG, {"format": 1}),
    "a number for what a tag begins with": (TAG, {"structures": [{"begin": 1, "end": "</f>"}], "triggers": ["<"]}),
    "a number for a tag's content": (
        TAG,
        {"format": {"type": "triggered_tags", "tags": [{"begin": "<", "content": 1, "end": ""}], "triggers": ["<"]}},
    ),
    "a backslash that escapes nothing": (REGEX, "ab\\"),
    "a backslash before the anchor's place": (REGEX, "ab\\\\\\"),
}


@pytest.mark.parametrize("name", [*BOMBS, *MALFORMED])
def test_is_refused(vetting, name):
    kind, text = (BOMBS | MALFORMED)[name]
    with pytest.raises(GrammarError):
        check(vetting, kind, text)


def test_a_grammar_without_any_text_says_so(vetting):
    with pytest.raises(GrammarError, match="no output satisfies it"):
        check(vetting, *BOMBS["a circle of references"])


def test_the_limit_of_size_is_exact(vetting):
    with pytest.raises(GrammarError, match="bytes"):
        vetting.check(EBNF, b" " * (MAX_GRAMMAR_BYTES + 1))
    text = 'start: "a"\n'
    assert check(vetting, EBNF, text + " " * (MAX_GRAMMAR_BYTES - len(text)))


def test_text_that_is_not_utf8_is_refused(vetting):
    with pytest.raises(GrammarError, match="UTF-8"):
        vetting.check(REGEX, b"\xff")


def test_the_time_a_grammar_waited_for_its_turn_counts(vetting):
    with pytest.raises(GrammarUnavailableError, match="other grammars were before it"):
        vetting.check(REGEX, b"a", PATIENCE_S)
    with pytest.raises(GrammarUnavailableError, match="not compiled within 8 s: the machine is too busy"):
        vetting.check(*bytes_of("a huge multiple"), PATIENCE_S - 0.05)
    assert check(vetting, REGEX, "a")


def test_a_grammar_behind_others_is_told_how_long_it_waited(tokenizer):
    class Gate:
        ready_at = 0.0

        def __init__(self):
            self.opens, self.waited_s = threading.Event(), {}

        def check(self, kind, text, waited_s):
            self.waited_s[text] = waited_s
            assert self.opens.wait(30)
            raise GrammarError("no")

        def close(self):
            pass

    compiler, gate = GrammarCompiler(tokenizer), Gate()
    compiler._vetting = gate
    engine = GrammarHarness(compiler)
    streams = [engine.constrained(REGEX, f"{index}") for index in range(12)]
    engine.core.step()
    started = time.monotonic()
    while len(gate.waited_s) < 4:  # one for each thread
        assert time.monotonic() < started + 30
    behind = time.monotonic() - started
    gate.opens.set()
    engine.finish()
    assert [error(stream) for stream in streams] == [ErrorCode.GRAMMAR] * 12
    assert gate.waited_s[b"11"] >= behind
    compiler.close()


def test_a_dead_vetting_process_is_replaced(vetting):
    check(vetting, REGEX, "a")
    vetting._process.kill()
    vetting._process.wait()
    assert check(vetting, REGEX, "b")


def test_a_process_that_takes_no_jobs_is_replaced(vetting):
    check(vetting, REGEX, "a")
    stopped = vetting._process
    psutil.Process(stopped.pid).suspend()
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda text: check(vetting, REGEX, text), ["[a-z]{3}", "[a-z]{4}"]))
    assert stopped.poll() is not None
    replacement = vetting._process
    assert check(vetting, REGEX, "b") and vetting._process is replacement


def test_a_job_killed_from_outside_is_tried_again_and_is_not_the_grammars_fault(vetting):
    """A bomb lasts long enough to be hit: twice, and nobody knows whether it is one."""
    check(vetting, REGEX, "a")
    server = psutil.Process(vetting._process.pid)
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(check, vetting, *BOMBS["a huge multiple"])
        for _ in range(2):
            wait_until(lambda: server.children() or verdict.done(), "the job runs")
            for job in server.children():
                job.kill()
                job.wait(20)
        with pytest.raises(GrammarUnavailableError, match="killed"):
            verdict.result(20)


def test_a_job_that_gets_no_cpu_is_waited_for(vetting):
    """Real time that passes is no fault of the grammar's."""
    check(vetting, REGEX, "a")
    server = psutil.Process(vetting._process.pid)
    with ThreadPoolExecutor(1) as pool:
        server.suspend()
        verdict = pool.submit(check, vetting, REGEX, "[a-z]{3}")
        with pytest.raises(TimeoutError):
            verdict.result(0.5)
        server.resume()
        assert verdict.result(20)


def test_a_long_job_goes_on_at_the_lowest_priority(vetting):
    check(vetting, REGEX, "a")
    server = psutil.Process(vetting._process.pid)
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(check, vetting, *BOMBS["a huge multiple"])
        wait_until(lambda: [job.nice() for job in server.children()] == [19], "it has been slowed down")
        with pytest.raises(GrammarError):
            verdict.result(PATIENCE_S)


def test_after_the_end_no_process_is_started_again(tokenizer):
    vetting = Vetting(tokenizer)
    check(vetting, REGEX, "a")
    process = vetting._process
    vetting.close()
    with pytest.raises(GrammarUnavailableError, match="ending"):
        check(vetting, REGEX, "b")
    assert process.poll() is not None and vetting._process is None


def test_the_vetting_process_ends_with_the_engine(tokenizer):
    vetting = Vetting(tokenizer)
    check(vetting, REGEX, "a")
    vetting._control.close()  # as the kernel does when the engine is killed
    assert vetting._process.wait(20) == 0
    vetting.close()


def test_bombs_end_as_errors_while_others_go_on(tokenizer):
    compiler = GrammarCompiler(tokenizer)
    engine = GrammarHarness(compiler, max_model_len=2000, num_blocks=600, max_num_seqs=40)
    try:
        free = [engine.submit([seed, 2, 3], max_tokens=100) for seed in range(8)]
        bombs = [engine.constrained(*BOMBS[name]) for name in BOMBS if name != "a huge multiple"]
        good = engine.constrained(REGEX, "[0-9]{5}")
        engine.core.step()
        steps = 0
        while any(stream.reason == FinishReason.NONE for stream in free):
            engine.core.step()
            steps += 1
            assert all(len(stream.token_ids) == steps + 1 for stream in free)  # every step brings a token to each
        engine.finish(60.0)
    finally:
        compiler.close()
    assert [error(stream) for stream in bombs] == [ErrorCode.GRAMMAR] * len(bombs)
    assert not any(stream.token_ids for stream in bombs)
    assert good.reason == FinishReason.STOP
    engine.check_nothing_left()


def test_equal_grammars_are_compiled_once_and_copies_are_independent(tokenizer, monkeypatch):
    compiler = GrammarCompiler(tokenizer)
    engine = GrammarHarness(compiler)
    compiled = []
    original = compiler._vetting.check
    monkeypatch.setattr(compiler._vetting, "check", lambda *job: compiled.append(job) or original(*job))
    try:
        streams = [engine.constrained(REGEX, "[a-z]{3}[0-9]{2}", temperature=1.0, seed=seed) for seed in range(5)]
        engine.finish()
        streams.append(engine.constrained(REGEX, "[a-z]{3}[0-9]{2}"))
        engine.finish()
    finally:
        compiler.close()
    assert len(compiled) == 1
    assert len({engine.text(stream) for stream in streams}) > 1
    assert all(stream.reason == FinishReason.STOP for stream in streams)


def test_a_compiler_thread_survives_what_it_does_not_expect(tokenizer, monkeypatch):
    compiler = GrammarCompiler(tokenizer)
    engine = GrammarHarness(compiler)
    monkeypatch.setattr(compiler._vetting, "check", lambda *job: 1 / 0)
    stream = engine.constrained(REGEX, "a")
    engine.finish()
    assert error(stream) == ErrorCode.GRAMMAR
    compiler.close()


def test_a_grammar_that_becomes_too_slow_ends_its_request_alone(tokenizer, monkeypatch):
    monkeypatch.setattr("tokring.engine.grammar._FREE_NS", -(10**9))
    compiler = GrammarCompiler(tokenizer)
    engine = GrammarHarness(compiler)
    try:
        free = engine.submit([1, 2, 3], max_tokens=20)
        slow = engine.constrained(REGEX, "[a-z]+")
        engine.finish()
    finally:
        compiler.close()
    assert error(slow) == ErrorCode.GRAMMAR and free.reason == FinishReason.LENGTH


def test_an_ambiguous_grammar_is_cut_where_it_becomes_too_slow(tokenizer):
    grammar = Grammar(tokenizer, tokenizer.compile('start: s\ns: s s s s | s s s | s s | "a" | '), [EOS_ID])
    mask = np.zeros(tokenizer.mask_words, np.uint32)
    letter = tokenizer.native.tokenize_str("a")
    for _ in range(2000):
        grammar.fill_mask(mask)
        if grammar.failure is not None or not grammar.accept(letter):
            break
    assert grammar.failure is not None
