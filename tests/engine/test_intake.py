"""Intake: what a front end may not ask for ends as a finish row, whatever the field, and never as a crash."""

import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine_harness import EngineHarness
from tokring_ipc import REQUEST_DTYPE, ErrorCode, ExtensionKind, FinishReason, RequestLimits

NAN = float("nan")
INFINITY = float("inf")
NEIGHBOUR = EngineHarness().generate([5, 6, 7], max_tokens=3)


#: Of a request to an engine whose vocabulary has 97 tokens and whose sequences have 256.
BAD_FIELDS: list[dict[str, Any]] = [
    {"ids": []},
    {"ids": [97]},
    {"ids": [-1]},
    {"ids": [2**31 - 1]},
    {"ids": [1] * 256},
    {"num_prior_output": 3},
    {"num_prior_output": 2**32 - 1},
    {"max_tokens": 1, "num_prior_output": 2},
    {"min_tokens": 17},
    {"temperature": NAN},
    {"temperature": INFINITY},
    {"temperature": -1.0},
    {"top_p": NAN},
    {"top_p": 1.5},
    {"min_p": -0.5},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": NAN},
    {"presence_penalty": INFINITY},
    {"frequency_penalty": NAN},
    {"num_logprobs": 21},
    {"num_logprobs": -2},
    {"num_prompt_logprobs": 21},
    {"num_stop_ids": 9},
    {"stop_ids": [97]},
    {"extensions": [(ExtensionKind.STOP_IDS, b"123")]},
    {"extensions": [(ExtensionKind.STOP_IDS, struct.pack("<i", 97))]},
    {"extensions": [(ExtensionKind.ALLOWED_IDS, struct.pack("<i", -5))]},
    {"extensions": [(ExtensionKind.ALLOWED_IDS, b"")]},
    {"extensions": [(ExtensionKind.LOGIT_BIAS, struct.pack("<if", 97, 1.0))]},
    {"extensions": [(ExtensionKind.LOGIT_BIAS, struct.pack("<if", 1, NAN))]},
    {"extensions": [(ExtensionKind.LOGIT_BIAS, b"1234")]},
    {"extensions": [(ExtensionKind.BAD_WORDS, struct.pack("<II", 2, 1))]},
    {"extensions": [(ExtensionKind.BAD_WORDS, struct.pack("<II", 2**32 - 1, 1))]},
    {"extensions": [(ExtensionKind.BAD_WORDS, struct.pack("<III", 1, 0, 1))]},
    {"extensions": [(ExtensionKind.BAD_WORDS, struct.pack("<III", 1, 1, 97))]},
    {"extensions": [(ExtensionKind.BAD_WORDS, b"")]},
    {"extensions": [(ExtensionKind.ADAPTER_ID, struct.pack("<I", 1))]},
    {"extensions": [(999, b"x")]},
]


LIMITS = RequestLimits(vocab_size=97, max_model_len=256, max_logprobs=20)
PLAIN = {"stream_slot": 3, "slot_generation": 2**32 - 1, "parent_slot": 2**32 - 1, "max_tokens": 16, "top_p": 1.0,
         "num_logprobs": -1, "num_prompt_logprobs": 5, "repetition_penalty": 1.0}  # fmt: skip


def record_of(**fields: Any) -> np.ndarray:
    record = np.zeros(1, REQUEST_DTYPE)
    for name, value in (PLAIN | fields).items():
        record[name][..., : np.size(value)] = value
    return record


def test_a_sound_record_comes_back_as_numbers_and_with_columns_that_can_be_copied():
    stop_ids = [5, 6, 1000]
    record = record_of(top_k=-1, num_stop_ids=2, priority=-7, deadline_ns=2**63, flags=2, parent_slot=9)
    record["stop_ids"][0, :3] = stop_ids
    checked, *numbers = LIMITS.check(record.tobytes(), np.array([1, 96, 0], np.int32))
    assert numbers == [3, 2**32 - 1, 9, 2, -7, 2**63, 3, 19, -1, 5, (5, 6), False, True]
    record["top_k"], record["stop_ids"][0, 2:] = 0, -2
    assert checked == record.tobytes()


@pytest.mark.parametrize(
    ("fields", "index", "value"),
    [
        ({"parent_slot": 3}, 3, -1),
        ({}, 3, -1),
        ({"num_prior_output": 1}, 7, 2),
        ({"num_prior_output": 1}, 8, 18),
        ({"num_prior_output": 1}, 10, -1),
        ({"max_tokens": 2**32 - 1}, 8, 256),
        ({"min_tokens": 1}, 12, True),
        ({"frequency_penalty": 0.5}, 12, True),
        ({"presence_penalty": -0.5}, 12, True),
        ({"repetition_penalty": 1.5}, 12, True),
        ({"num_prior_output": 1}, 13, False),
        ({"num_prompt_logprobs": -1}, 13, False),
        ({"num_prompt_logprobs": -1, "max_tokens": 0}, 13, True),
        ({}, 6, 2**64 - 1),
    ],
)
def test_what_a_record_means_to_the_engine(fields, index, value):
    assert LIMITS.check(record_of(**fields).tobytes(), np.array([1, 2, 3], np.int32))[index] == value


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"temperature": NAN}, "temperature: nan is not between 0 and 100.0"),
        ({"top_p": 1.5}, "top_p 1.5 or min_p 0.0 is not between 0 and 1"),
        ({"min_tokens": 17}, "min_tokens: 17 is above max_tokens (16)"),
        ({"num_prior_output": 2**32 - 1}, "num_ids: 3 ids hold no prompt token"),
        ({"num_logprobs": 21}, "num_logprobs: 21 is not between -1 and 20"),
        ({"num_stop_ids": 2**32 - 1}, "num_stop_ids: 4294967295 is above 8"),
        ({"num_stop_ids": 1, "stop_ids": 97}, "stop_ids: 97 is not in the vocabulary (0 to 96)"),
    ],
)
def test_a_refusal_names_the_field_and_its_limit(fields, why):
    with pytest.raises(ValueError, match="^" + re.escape(why) + "$"):
        LIMITS.check(record_of(**fields).tobytes(), np.array([1, 2, 3], np.int32))


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=repr)
def test_a_field_out_of_range_is_refused_and_others_go_on(fields):
    harness = EngineHarness()
    fields = dict(fields)
    refused = harness.submit(fields.pop("ids", [1, 2, 3]), **fields)
    neighbour = harness.submit([5, 6, 7], max_tokens=3)
    harness.run()
    assert (refused.reason, refused.finish["error_code"]) == (FinishReason.ERROR, ErrorCode.INVALID_REQUEST)
    assert refused.token_ids == [] and neighbour.token_ids == NEIGHBOUR
    harness.check_nothing_left()


def test_grammars_are_refused_by_their_own_error_code():
    harness = EngineHarness()
    stream = harness.submit([1], extensions=[(ExtensionKind.GRAMMAR_REGEX, b"a+")])
    harness.run()
    assert stream.finish["error_code"] == ErrorCode.GRAMMAR


NUMBERS = {name for name in REQUEST_DTYPE.names if name not in ("stream_slot", "slot_generation", "stop_ids")}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_record_whatever_its_bytes_brings_the_engine_down(data):
    fields = {}
    for name in data.draw(st.sets(st.sampled_from(sorted(NUMBERS)), max_size=4)):
        kind = REQUEST_DTYPE[name]
        raw = data.draw(st.binary(min_size=kind.itemsize, max_size=kind.itemsize))
        fields[name] = np.frombuffer(raw, kind)[0]
    kinds = st.integers(0, 14)
    extensions = data.draw(st.lists(st.tuples(kinds, st.binary(max_size=24)), max_size=2))
    ids = data.draw(st.lists(st.integers(-1, 97), max_size=8))
    harness = EngineHarness()
    stream = harness.submit(ids, extensions=extensions, **fields)
    harness.run()
    assert stream.finish is not None
    harness.check_nothing_left()
