"""check_json_schema accepts what is a schema and refuses, quickly, what is none."""

import asyncio
from typing import Any

import pytest

from tokring.sampling_params import ParameterError
from tokring.server.json_schema import MAX_NODES, SLICE_S, check_json_schema


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": ["object", "null"]},
        {
            "type": "object",
            "properties": {"a": {"enum": ["x", 1, None]}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"$ref": "#/$defs/e", "$defs": {"e": {"type": "string", "pattern": "^a+$"}}},
        {"type": "array", "items": {"anyOf": [{"const": 1}, {"type": "number", "minimum": -1e308}]}, "minItems": 2},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "object", "properties": {"self": {"$ref": "#"}}},
    ],
)
def test_schemas_are_accepted(schema: Any) -> None:
    asyncio.run(check_json_schema(schema, "response_format"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "not-a-type"},
        {"type": []},
        {"type": "object", "properties": [1]},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"$ref": "http://example.com/schema"},
        {"enum": []},
        {"pattern": 1},
        {"pattern": "a" * 2000},
        {"minItems": -1},
        {"minItems": 10**9},
        {"minimum": "0"},
        {"required": "a"},
        {"anyOf": []},
        {"items": 5},
        {"enum": list(range(5000))},
    ],
)
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        asyncio.run(check_json_schema(schema, "response_format"))
    assert caught.value.param == "response_format"


def test_deep_and_wide_schemas_are_refused() -> None:
    deep: Any = {"type": "null"}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ParameterError, match="deeper"):
        asyncio.run(check_json_schema(deep, "tools"))
    with pytest.raises(ParameterError, match="subschemas"):
        asyncio.run(check_json_schema({"properties": {str(n): {} for n in range(20_000)}}, "tools"))


def test_the_place_of_a_fault_is_named() -> None:
    schema = {"$defs": {"x": {"anyOf": [True, {"properties": {"a": {"items": {"type": "odd"}}}}]}}}
    with pytest.raises(ParameterError, match=r"unknown type 'odd' \(at #/\$defs/x/anyOf/1/properties/a/items\)"):
        asyncio.run(check_json_schema(schema, "tools"))


def test_other_tasks_go_on_while_a_large_schema_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))  # each look at it is longer than a slice
    monkeypatch.setattr("time.perf_counter", lambda: next(clock) * 2 * SLICE_S)
    schema = {"properties": {str(n): {"type": "string"} for n in range(MAX_NODES - 1)}}

    async def turns_of_another() -> int:
        check = asyncio.ensure_future(check_json_schema(schema, "tools"))
        turns = 0
        while not check.done():
            await asyncio.sleep(0)
            turns += 1
        check.result()
        return turns

    assert asyncio.run(turns_of_another()) >= MAX_NODES
