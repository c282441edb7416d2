"""Structured output through the whole engine: what comes out follows the grammar, whatever else is asked for."""

import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engine_harness import EngineHarness
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer, tiny_tokenizer_json
from tests.support.toy_runner import ToyRunner
from tokring.engine.grammar import GrammarTokenizer
from tokring.engine.grammar_compiler import GrammarCompiler
from tokring_ipc import ErrorCode, ExtensionKind, FinishReason

TOKENIZER = tiny_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(GrammarTokenizer(tiny_tokenizer_json(), VOCAB_SIZE, [EOS_ID]))
    yield compiler
    compiler.close()


class GrammarHarness(EngineHarness):
    """An engine with a compiler of grammars."""

    def __init__(self, compiler, **config):
        super().__init__(ToyRunner(vocab_size=VOCAB_SIZE), **config)
        self.core.grammars = compiler

    def constrained(self, kind, text, ids=(10, 11, 12), **fields):
        grammar = (kind, text.encode() if isinstance(text, str) else json.dumps(text).encode())
        extensions = [grammar, *fields.pop("extensions", ())]
        defaults = {"max_tokens": 60, "stop_ids": [EOS_ID], "eos_mask": 1}
        return self.submit(list(ids), extensions=extensions, **(defaults | fields))

    def text(self, stream):
        return TOKENIZER.decode([token for token in stream.token_ids if token != EOS_ID], skip_special_tokens=False)


@pytest.fixture
def engine(compiler):
    return GrammarHarness(compiler)


def error(stream):
    return ErrorCode(int(stream.finish["error_code"]))


def test_json_follows_its_schema(engine):
    streams = [
        engine.constrained(ExtensionKind.GRAMMAR_JSON_SCHEMA, SCHEMA, temperature=1.0, seed=seed, max_tokens=200)
        for seed in range(6)
    ]
    engine.finish()
    for stream in streams:
        assert stream.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if stream.reason == FinishReason.STOP:
            value = json.loads(engine.text(stream))
            assert value["name"] in ("Ann", "Bob") and 0 <= value["age"] <= 99
    assert any(stream.reason == FinishReason.STOP for stream in streams)
    engine.check_nothing_left()


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        (ExtensionKind.GRAMMAR_REGEX, r"^[a-c]{2}-[0-9]{3}$", r"[a-c]{2}-[0-9]{3}"),
        (ExtensionKind.GRAMMAR_CHOICE, ["the ship", 'a "quoted" 🦙 one'], r'the ship|a "quoted" 🦙 one'),
        (ExtensionKind.GRAMMAR_EBNF, 'root ::= "yes" | "no" digit\ndigit ::= [0-9]', r"yes|no[0-9]"),
        (ExtensionKind.GRAMMAR_EBNF, 'start: "a" b\nb: /[xy]{3}/', r"a[xy]{3}"),
    ],
)
def test_each_kind_of_grammar_is_followed_to_its_end(engine, kind, text, pattern):
    streams = [engine.constrained(kind, text, temperature=1.0, seed=seed) for seed in range(4)]
    engine.finish()
    for stream in streams:
        assert stream.reason == FinishReason.STOP
        assert re.fullmatch(pattern, engine.text(stream))


def test_any_json_object_is_one(engine):
    stream = engine.constrained(ExtensionKind.GRAMMAR_JSON_OBJECT, "{}", max_tokens=200)
    engine.finish()
    text = engine.text(stream).lstrip()
    assert text.startswith("{")
    if stream.reason == FinishReason.STOP:
        assert isinstance(json.loads(text), dict)


def test_a_structural_tag_constrains_only_what_follows_its_trigger(engine):
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": {"const": 7}, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    stream = engine.constrained(ExtensionKind.GRAMMAR_STRUCTURAL_TAG, tag, max_tokens=8)
    engine.finish()
    assert stream.reason == FinishReason.LENGTH and len(stream.token_ids) == 8


def test_an_output_that_is_cut_says_length(engine):
    stream = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[a-z]{50}", max_tokens=5)
    engine.finish()
    assert stream.reason == FinishReason.LENGTH and len(stream.token_ids) == 5


def test_eos_ends_an_output_only_where_the_grammar_is_satisfied(engine):
    bias = (ExtensionKind.LOGIT_BIAS, np.array([EOS_ID], np.int32).tobytes() + np.array([100], np.float32).tobytes())
    stream = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[a-z][0-9]+", extensions=[bias])
    engine.finish()
    assert stream.reason == FinishReason.STOP and stream.finish["stop_id"] == EOS_ID
    assert stream.token_ids[-1] == EOS_ID
    assert re.fullmatch("[a-z][0-9]+", engine.text(stream))


def test_without_eos_ids_a_grammar_that_can_go_on_goes_on(engine):
    stream = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[a-z]+", stop_ids=[], eos_mask=0, max_tokens=12)
    engine.finish()
    assert stream.reason == FinishReason.LENGTH and re.fullmatch("[a-z]+", engine.text(stream))


def test_min_tokens_cannot_make_a_complete_output_go_on(engine):
    stream = engine.constrained(ExtensionKind.GRAMMAR_CHOICE, ["the"], min_tokens=30)
    engine.finish()
    assert stream.reason == FinishReason.STOP and engine.text(stream) == "the"


def test_min_tokens_keeps_an_output_going_that_might_end(engine):
    stream = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[0-9]+", min_tokens=20, max_tokens=25)
    engine.finish()
    assert len(stream.token_ids) >= 20


def test_allowed_ids_that_contradict_the_grammar_are_an_error_of_that_request_alone(engine):
    only = (ExtensionKind.ALLOWED_IDS, np.array(TOKENIZER.encode("x").ids, np.int32).tobytes())
    refused = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[0-9]+", extensions=[only])
    served = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[0-9]{3}")
    engine.finish()
    assert refused.reason == FinishReason.ERROR and error(refused) == ErrorCode.GRAMMAR and not refused.token_ids
    assert re.fullmatch("[0-9]{3}", engine.text(served))


def test_other_rows_are_not_changed_by_constrained_ones(engine, compiler):
    alone = GrammarHarness(compiler).generate([5, 6, 7], max_tokens=20)
    engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[0-9]{40}")
    free = engine.submit([5, 6, 7], max_tokens=20)
    engine.finish()
    assert free.token_ids == alone


def test_logprobs_and_choices_work_under_a_grammar(engine):
    first = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[0-9]{6}", num_logprobs=3, temperature=1.0)
    others = [
        engine.constrained(
            ExtensionKind.GRAMMAR_REGEX,
            "[0-9]{6}",
            num_logprobs=3,
            temperature=1.0,
            choice_index=choice,
            parent_slot=first.stream_slot,
        )
        for choice in (1, 2)
    ]
    engine.finish()
    texts = set()
    for stream in (first, *others):
        assert len(stream.logprobs) == len(stream.token_ids)
        assert all(np.isfinite(logprob) for _, logprob, _, _ in stream.logprobs)
        texts.add(engine.text(stream))
    assert len(texts) == 3 and all(re.fullmatch("[0-9]{6}", text) for text in texts)


def test_preemption_does_not_change_a_constrained_output(compiler):
    def run(num_blocks):
        engine = GrammarHarness(compiler, num_blocks=num_blocks, max_model_len=128)
        streams = [
            engine.constrained(
                ExtensionKind.GRAMMAR_REGEX, "([a-z]+ [0-9]+,)+", ids=[20 + i] * 9, max_tokens=70, seed=i
            )
            for i in range(4)
        ]
        engine.finish()
        engine.check_nothing_left()
        return [stream.token_ids for stream in streams], engine.core.scheduler.num_preemptions

    roomy, none = run(64)
    tight, some = run(9)
    assert none == 0 and some > 0
    assert tight == roomy


def test_a_resumed_request_goes_on_where_its_grammar_was(engine, compiler):
    whole = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[a-z]{3}[0-9]{8}[A-Z]{2}")
    engine.finish()
    assert whole.reason == FinishReason.STOP
    prior = whole.token_ids[:5]
    other = GrammarHarness(compiler)
    resumed = other.constrained(
        ExtensionKind.GRAMMAR_REGEX,
        "[a-z]{3}[0-9]{8}[A-Z]{2}",
        ids=[10, 11, 12, *prior],
        num_prior_output=5,
        seed=0,
    )
    other.finish()
    assert prior + resumed.token_ids == whole.token_ids


def test_a_prior_output_that_breaks_the_grammar_is_refused(engine):
    stream = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[0-9]+", ids=[10, 11, 12, 300], num_prior_output=1)
    engine.finish()
    assert error(stream) == ErrorCode.GRAMMAR


def test_a_request_can_be_aborted_while_its_grammar_is_compiled_and_after(engine):
    early = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[0-9]{1,7}x")
    engine.core.step()
    engine.channel.cancel(early)
    engine.finish()
    late = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[a-z]{50}")
    while not late.token_ids:
        engine.core.step()
    engine.channel.cancel(late)
    engine.finish()
    assert early.reason == late.reason == FinishReason.ABORT
    engine.check_nothing_left()


def test_waiting_for_a_compiler_holds_up_nobody_else(engine):
    waiting = engine.constrained(ExtensionKind.GRAMMAR_JSON_SCHEMA, {"type": "integer", "multipleOf": 999983})
    free = engine.submit([1, 2, 3], max_tokens=20)
    for _ in range(21):
        engine.core.step()
    assert free.reason == FinishReason.LENGTH and waiting.reason == FinishReason.NONE
    engine.channel.cancel(waiting)
    engine.finish()


def test_two_grammars_are_refused(engine):
    both = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "a", extensions=[(ExtensionKind.GRAMMAR_CHOICE, b'["a"]')])
    engine.finish()
    assert error(both) == ErrorCode.INVALID_REQUEST


def test_an_engine_without_a_compiler_refuses_grammars(engine):
    engine.core.grammars = None
    stream = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "a")
    engine.finish()
    assert error(stream) == ErrorCode.GRAMMAR


def test_nan_under_a_grammar_is_the_models_error(engine):
    engine.runner.nan_after_token = 12
    stream = engine.constrained(ExtensionKind.GRAMMAR_REGEX, "[0-9]+")
    engine.finish()
    assert error(stream) == ErrorCode.NOT_FINITE


REGEXES = ("[a-z]{1,12}", "([0-9]{2},)+", "(yes|no)( [a-z]+)*", "[^a-z]{3,30}")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.tuples(st.sampled_from(REGEXES), st.sampled_from([0.0, 1.5]), st.integers(1, 40), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    num_blocks=st.integers(8, 40),
)
def test_any_mix_of_constrained_requests_follows_its_grammars(compiler, requests, num_blocks):
    engine = GrammarHarness(compiler, num_blocks=num_blocks, max_model_len=128)
    streams = []
    for seed, (pattern, temperature, max_tokens, is_cancelled) in enumerate(requests):
        stream = engine.constrained(
            ExtensionKind.GRAMMAR_REGEX, pattern, temperature=temperature, max_tokens=max_tokens, seed=seed
        )
        engine.submit([seed, 9], max_tokens=max_tokens)
        if is_cancelled:
            for _ in range(seed):
                engine.core.step()
            engine.channel.cancel(stream)
        streams.append((stream, pattern))
    engine.finish()
    for stream, pattern in streams:
        if stream.reason == FinishReason.STOP:
            assert re.fullmatch(pattern, engine.text(stream))
        else:
            assert stream.reason in (FinishReason.LENGTH, FinishReason.ABORT)
    engine.check_nothing_left()
    engine.check_consistent()
