"""SamplingParams refuse what no sampler could use, and records say what was asked for."""

import math
from typing import Any

import numpy as np
import pytest

from tokring.request_record import seed_source, to_record
from tokring.sampling_params import (
    ParameterError,
    SamplingParams,
    StructuredKind,
    StructuredOutput,
    parse_logit_bias,
)
from tokring_ipc import ExtensionKind, RequestFlag, decode_extensions


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 0),
        ("n", 10**9),
        ("temperature", -1e-9),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("min_p", 5.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e30),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("stop", tuple("x" * n for n in range(1, 300))),
        ("stop_token_ids", tuple(range(5000))),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 10**6),
        ("logit_bias", ((7, 1000.0),)),
        ("logit_bias", ((7, math.nan),)),
        ("bad_words", ((),)),
        ("priority", 2**40),
        ("best_of", 129),
        ("n", 10**400),
        ("n", 1.5),
        ("top_k", math.inf),
        ("top_k", "1"),
        ("seed", 1.0),
        ("max_tokens", "16"),
        ("min_tokens", None),
        ("logprobs", 1.5),
        ("priority", [1]),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", 10**400),
        ("stop", 5),
        ("stop", [5]),
        ("stop", "\ud800"),
        ("stop_token_ids", 5),
        ("allowed_token_ids", "ab"),
        ("logit_bias", [5]),
        ("logit_bias", {5: "a"}),
        ("bad_words", "word"),
        ("bad_words", ["word"]),
        ("bad_words", [5]),
        ("logprob_token_ids", (5,)),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("cache_salt", 5),
        ("cache_salt", "\ud800"),
        ("structured_output", {"regex": "a"}),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("kind", "text"), [("nonsense", "x"), ("json_schema", {"type": "null"}), ("choice", ["a"]), ("regex", "\ud800")]
)
def test_a_constraint_that_is_none_is_refused_when_it_is_made(kind: Any, text: Any) -> None:
    with pytest.raises(ParameterError, match="structured_outputs"):
        StructuredOutput(kind, text)


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), max_tokens=np.int32(7), stop_token_ids=[np.int64(3)]
    )
    assert (params.n, params.temperature, params.max_tokens) == (2, 0.5, 7)
    assert {type(params.n), type(params.max_tokens)} == {int} and type(params.temperature) is float
    params.check_vocabulary(4)


def test_ends_of_the_ranges_are_accepted() -> None:
    SamplingParams(n=1, temperature=0.0, top_p=0.0, top_k=-1, min_p=0.0, presence_penalty=2.0, frequency_penalty=-2.0)
    SamplingParams(n=128, temperature=100.0, top_p=1.0, top_k=10**12, min_p=1.0, seed=-(2**63), max_tokens=2**31 - 1)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(max_tokens=4, min_tokens=9)
    assert caught.value.param == "min_tokens"


def test_best_of_below_n_is_refused() -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(n=3, best_of=2)
    assert caught.value.param == "best_of"


@pytest.mark.parametrize("key", ["-1", "abc", "1.5", " 7", "", "99999999999999999999", "²"])
def test_logit_bias_keys_must_be_token_ids(key: str) -> None:
    with pytest.raises(ParameterError):
        parse_logit_bias({key: 1.0})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": (160,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": ((160, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (2**31,)}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": ((5, 160),)}, "bad_words"),
    ],
)
def test_token_ids_outside_the_vocabulary_and_none_at_all_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**fields).check_vocabulary(160)
    assert caught.value.param == param


def record_of(params: SamplingParams, **overrides: Any) -> tuple[np.void, dict[int, bytes]]:
    options: dict[str, Any] = {"stream_slot": 3, "slot_generation": 7, "max_tokens": 16, "eos_ids": (2,), "seed": 5}
    record, extensions = to_record(params, arrival_ns=1, **{**options, **overrides})
    return record[0], {int(kind): bytes(data) for kind, data in decode_extensions(extensions)}


def test_a_record_holds_every_scalar() -> None:
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, min_tokens=2, logprobs=3, priority=-4, seed=5
    )
    row, extensions = record_of(params)
    assert (row["stream_slot"], row["slot_generation"], row["max_tokens"], row["min_tokens"]) == (3, 7, 16, 2)
    assert row["temperature"] == np.float32(0.5) and row["top_p"] == np.float32(0.9) and row["top_k"] == 40
    assert row["num_logprobs"] == 3 and row["num_prompt_logprobs"] == -1 and row["priority"] == -4 and row["seed"] == 5
    assert row["flags"] == RequestFlag.SEED_GIVEN
    assert extensions == {}


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 5e-324])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    row, _ = record_of(SamplingParams(temperature=temperature))
    assert row["temperature"] == 0


def test_end_of_text_ids_go_first_and_are_marked() -> None:
    row, _ = record_of(SamplingParams(stop_token_ids=(9, 2)), eos_ids=(2, 4))
    assert row["stop_ids"][: row["num_stop_ids"]].tolist() == [2, 4, 9]
    assert row["eos_mask"] == 0b11


def test_ignore_eos_leaves_only_the_clients_stop_ids() -> None:
    row, _ = record_of(SamplingParams(ignore_eos=True, stop_token_ids=(9,)))
    assert row["stop_ids"][: row["num_stop_ids"]].tolist() == [9]
    assert row["eos_mask"] == 0


def test_stop_ids_that_do_not_fit_inline_travel_as_an_extension() -> None:
    row, extensions = record_of(SamplingParams(stop_token_ids=tuple(range(10, 30))))
    assert row["num_stop_ids"] == 8
    rest = np.frombuffer(extensions[ExtensionKind.STOP_IDS], np.int32).tolist()
    assert sorted([*row["stop_ids"].tolist(), *rest]) == [2, *range(10, 30)]


def test_lists_and_grammars_travel_as_extensions() -> None:
    params = SamplingParams(
        logit_bias=((5, 1.5), (6, -2.0)),
        allowed_token_ids=(5, 6),
        bad_words=((1, 2), (3,)),
        structured_output=StructuredOutput(StructuredKind.REGEX, "a+"),
        cache_salt="tenant",
    )
    _, extensions = record_of(params)
    bias = extensions[ExtensionKind.LOGIT_BIAS]
    assert np.frombuffer(bias[:8], np.int32).tolist() == [5, 6]
    assert np.frombuffer(bias[8:], np.float32).tolist() == [1.5, -2.0]
    assert np.frombuffer(extensions[ExtensionKind.ALLOWED_IDS], np.int32).tolist() == [5, 6]
    assert np.frombuffer(extensions[ExtensionKind.BAD_WORDS], np.int32).tolist() == [2, 2, 1, 1, 2, 3]
    assert extensions[ExtensionKind.GRAMMAR_REGEX] == b"a+"
    assert extensions[ExtensionKind.CACHE_SALT] == b"tenant"


def test_a_server_seed_gives_the_same_draws_after_every_start_and_others_in_each_front_end() -> None:
    def draws(*arguments: int | None) -> list[int]:
        draw = seed_source(*arguments)
        return [draw() for _ in range(3)]

    assert draws(7) == draws(7)
    assert len({*draws(7), *draws(8), *draws(7, 1), *draws(None), *draws(None)}) == 15
