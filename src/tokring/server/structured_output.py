"""response_format, structured_outputs and guided_*: one constraint each, checked before anything is submitted."""

from typing import Any

import orjson

from tokring.sampling_params import ParameterError, StructuredKind, StructuredOutput
from tokring.server.api_types import GenerationFields, ResponseFormat, StructuredOutputs
from tokring.server.json_schema import check_json_schema
from tokring.server.json_text import JsonError, load_json

MAX_CHOICES = 1024
MAX_REGEX_CHARS = 4096


async def structured_output_of(request: GenerationFields) -> StructuredOutput | None:
    """The request's constraint, None without one. Raises ParameterError, also if there are several."""
    found = [
        ("response_format", await _from_response_format(request.response_format)),
        ("structured_outputs", await _from_structured_outputs(request.structured_outputs)),
        ("guided_json", await _json(request.guided_json, "guided_json")),
        ("guided_regex", _regex(request.guided_regex, "guided_regex")),
        ("guided_choice", _choice(request.guided_choice, "guided_choice")),
        ("guided_grammar", _grammar(request.guided_grammar, "guided_grammar")),
    ]
    given = [(param, constraint) for param, constraint in found if constraint is not None]
    if len(given) > 1:
        raise ParameterError(
            given[1][0], f"{given[0][0]} and {given[1][0]} are both given; only one constraint is possible."
        )
    return given[0][1] if given else None


async def json_schema_constraint(schema: dict[str, Any] | bool, param: str) -> StructuredOutput:
    """A constraint to JSON that the schema accepts. Raises ParameterError if the schema is malformed."""
    await check_json_schema(schema, param)
    return StructuredOutput(StructuredKind.JSON_SCHEMA, orjson.dumps(schema).decode(), param)


async def _from_response_format(value: ResponseFormat | None) -> StructuredOutput | None:
    if value is None or value.type == "text":
        return None
    if value.type == "json_object":
        return StructuredOutput(StructuredKind.JSON_OBJECT, "{}", "response_format")
    if value.type != "json_schema":
        raise ParameterError(
            "response_format",
            f"response_format.type must be text, json_object or json_schema, not {value.type[:40]!r}.",
        )
    if value.json_schema is None or value.json_schema.schema is None:
        raise ParameterError("response_format", "response_format.json_schema.schema is missing.")
    return await json_schema_constraint(value.json_schema.schema, "response_format")


async def _from_structured_outputs(value: StructuredOutputs | None) -> StructuredOutput | None:
    if value is None:
        return None
    param = "structured_outputs"
    for option in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(value, option):
            raise ParameterError(param, f"structured_outputs.{option} is not supported.")
    found = [
        await _json(value.json, param),
        _regex(value.regex, param),
        _choice(value.choice, param),
        _grammar(value.grammar, param),
        StructuredOutput(StructuredKind.JSON_OBJECT, "{}", param) if value.json_object else None,
        _structural_tag(value.structural_tag, param),
    ]
    given = [constraint for constraint in found if constraint is not None]
    if len(given) != 1:
        raise ParameterError(param, f"structured_outputs needs exactly one constraint, got {len(given)}.")
    return given[0]


async def _json(value: dict[str, Any] | str | None, param: str) -> StructuredOutput | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = load_json(value)
        except JsonError as error:
            raise ParameterError(param, f"{param}: the schema is {error}.") from None
    if not isinstance(value, dict | bool):
        raise ParameterError(param, f"{param}: a JSON schema must be an object.")
    return await json_schema_constraint(value, param)


def _regex(value: str | None, param: str) -> StructuredOutput | None:
    if value is None:
        return None
    if len(value) > MAX_REGEX_CHARS:
        raise ParameterError(param, f"{param}: the expression is longer than {MAX_REGEX_CHARS} characters.")
    return StructuredOutput(StructuredKind.REGEX, value, param)


def _choice(value: list[str] | None, param: str) -> StructuredOutput | None:
    if value is None:
        return None
    if not 0 < len(value) <= MAX_CHOICES or "" in value:
        raise ParameterError(param, f"{param}: 1 to {MAX_CHOICES} non-empty strings are needed.")
    return StructuredOutput(StructuredKind.CHOICE, orjson.dumps(value).decode(), param)


def _grammar(value: str | None, param: str) -> StructuredOutput | None:
    if value is None:
        return None
    if not value.strip():
        raise ParameterError(param, f"{param}: the grammar is empty.")
    return StructuredOutput(StructuredKind.GRAMMAR, value, param)


def _structural_tag(value: str | dict[str, Any] | None, param: str) -> StructuredOutput | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    try:
        load_json(text)
    except JsonError as error:
        raise ParameterError(param, f"{param}: structural_tag is {error}.") from None
    return StructuredOutput(StructuredKind.STRUCTURAL_TAG, text, param)
