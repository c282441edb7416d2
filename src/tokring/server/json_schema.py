"""check_json_schema: refuses what is no JSON Schema, in bounded time, before the engine's grammar compiler sees it."""

import re
from typing import Any

from tokring.sampling_params import ParameterError

MAX_DEPTH = 32
MAX_NODES = 10_000
MAX_ENUM_VALUES = 4096
MAX_PATTERN_CHARS = 1024
MAX_REPEAT = 100_000
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_SUBSCHEMA = ("additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_json_schema(schema: dict[str, Any] | bool, param: str) -> None:
    """Raises ParameterError naming the place of the first fault."""
    _Checker(schema, param).check(schema, "#", 0)


def moved_json_schema(schema: Any, place: str) -> Any:
    """A checked schema as it must be to stand at `place` ("#/$defs/f") of another: its references lead there."""
    if not isinstance(schema, dict):
        return schema
    moved = {key: value for key, value in schema.items() if key != "$id"}  # which would be a root of its own
    if "$ref" in moved:
        moved["$ref"] = place + moved["$ref"].removeprefix("#")
    for name in (*_SUBSCHEMA, "items", *_SCHEMA_LISTS):
        child = moved.get(name)
        if isinstance(child, list):
            moved[name] = [moved_json_schema(item, place) for item in child]
        elif child is not None:
            moved[name] = moved_json_schema(child, place)
    for name in _SCHEMA_MAPS:
        if name in moved:
            moved[name] = {key: moved_json_schema(child, place) for key, child in moved[name].items()}
    return moved


class _Checker:
    def __init__(self, root: Any, param: str) -> None:
        self._root = root
        self._param = param
        self._num_nodes = 0

    def check(self, schema: Any, place: str, depth: int) -> None:
        self._num_nodes += 1
        self._require(depth <= MAX_DEPTH, place, f"nested deeper than {MAX_DEPTH}")
        self._require(self._num_nodes <= MAX_NODES, place, f"more than {MAX_NODES} subschemas")
        if isinstance(schema, bool):
            return
        self._require(isinstance(schema, dict), place, "a schema must be an object or a boolean")
        self._check_type(schema, place)
        self._check_values(schema, place)
        self._check_reference(schema, place)
        self._check_children(schema, place, depth + 1)

    def _check_type(self, schema: dict[str, Any], place: str) -> None:
        if "type" not in schema:
            return
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        self._require(bool(names), place, "type is an empty list")
        for name in names:
            self._require(isinstance(name, str) and name in _TYPES, place, f"unknown type {str(name)[:40]!r}")

    def _check_values(self, schema: dict[str, Any], place: str) -> None:
        if "enum" in schema:
            values = schema["enum"]
            self._require(isinstance(values, list) and bool(values), place, "enum must be a non-empty list")
            self._require(len(values) <= MAX_ENUM_VALUES, place, f"enum has more than {MAX_ENUM_VALUES} values")
        for name in _COUNTS:
            value = schema.get(name, 0)
            is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_REPEAT
            self._require(is_count, place, f"{name} must be a whole number from 0 to {MAX_REPEAT}")
        for name in _NUMBERS:
            value = schema.get(name, 0)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            self._require(is_number, place, f"{name} must be a number")
        if "required" in schema:
            names = schema["required"]
            is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
            self._require(is_list, place, "required must be a list of strings")
        self._check_pattern(schema.get("pattern", ""), place)

    def _check_pattern(self, pattern: Any, place: str) -> None:
        self._require(isinstance(pattern, str), place, "pattern must be a string")
        self._require(
            len(pattern) <= MAX_PATTERN_CHARS, place, f"pattern is longer than {MAX_PATTERN_CHARS} characters"
        )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise self._fault(place, f"pattern is no regular expression: {error}") from None

    def _check_reference(self, schema: dict[str, Any], place: str) -> None:
        if "$ref" not in schema:
            return
        reference = schema["$ref"]
        self._require(isinstance(reference, str) and reference.startswith("#"), place, "only local $ref are supported")
        target: Any = self._root
        for part in reference[1:].strip("/").split("/"):
            if part == "":
                continue
            key = part.replace("~1", "/").replace("~0", "~")
            self._require(isinstance(target, dict) and key in target, place, f"$ref {reference[:80]!r} leads nowhere")
            target = target[key]

    def _check_children(self, schema: dict[str, Any], place: str, depth: int) -> None:
        for name in _SUBSCHEMA:
            if name in schema:
                self.check(schema[name], f"{place}/{name}", depth)
        items = schema.get("items", True)
        for index, item in enumerate(items if isinstance(items, list) else [items]):
            self.check(item, f"{place}/items/{index}", depth)
        for name in _SCHEMA_MAPS:
            children = schema.get(name, {})
            self._require(isinstance(children, dict), place, f"{name} must be an object")
            for key, child in children.items():
                self.check(child, f"{place}/{name}/{key[:40]}", depth)
        for name in _SCHEMA_LISTS:
            children = schema.get(name, [True])
            self._require(isinstance(children, list) and bool(children), place, f"{name} must be a non-empty list")
            for index, child in enumerate(children):
                self.check(child, f"{place}/{name}/{index}", depth)

    def _require(self, condition: bool, place: str, fault: str) -> None:
        if not condition:
            raise self._fault(place, fault)

    def _fault(self, place: str, fault: str) -> ParameterError:
        return ParameterError(self._param, f"{self._param}: not a JSON schema: {fault} (at {place[:200]}).")
