"""Intake: what a front end may not ask for ends as a finish row, whatever the field, and never as a crash."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine_harness import EngineHarness
from tokring.engine.request import RecordValues
from tokring_ipc import REQUEST_DTYPE, ErrorCode, ExtensionKind, FinishReason

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


def test_record_values_name_the_fields_of_the_layout():
    assert RecordValues._fields == REQUEST_DTYPE.names


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
