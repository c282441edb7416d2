"""check_json_schema accepts what is a schema and refuses, quickly, what is none."""

from typing import Any

import pytest

from tokring.sampling_params import ParameterError
from tokring.server.json_schema import check_json_schema


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
    check_json_schema(schema, "response_format")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "not-a-type"},
        {"type": []},
        {"type": "object", "properties": [1]},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"$ref": "http://example.com/schema"},
        {"enum": []},
        {"pattern": "["},
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
        check_json_schema(schema, "response_format")
    assert caught.value.param == "response_format"


def test_deep_and_wide_schemas_are_refused() -> None:
    deep: Any = {"type": "null"}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ParameterError, match="deeper"):
        check_json_schema(deep, "tools")
    with pytest.raises(ParameterError, match="subschemas"):
        check_json_schema({"properties": {str(n): {} for n in range(20_000)}}, "tools")
