"""check_json_schema: refuses what is no JSON Schema, before the engine's grammar compiler sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from tokring.sampling_params import ParameterError

MAX_DEPTH = 32
MAX_NODES = 5_000
MAX_ENUM_VALUES = 4096
MAX_PATTERN_CHARS = 1024
MAX_REPEAT = 100_000
SLICE_S = 0.0005
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_SUBSCHEMAS = (
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedProperties",
)
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


async def check_json_schema(schema: dict[str, Any] | bool, param: str) -> None:
    """Raises ParameterError naming the place of a fault. It takes SLICE_S at a time: other streams go on meanwhile.

    Whether a pattern is a regular expression is left to the compiler, which knows its own language.
    """
    for _ in _Checker(schema, param).slices():
        await asyncio.sleep(0)


_Place: TypeAlias = "tuple[str, _Place | None]"  # its last part, and where the schema around it is


def moved_json_schema(schema: Any, place: str) -> Any:
    """A checked schema as it must be to stand at `place` ("#/$defs/f") of another: its references lead there."""
    if not isinstance(schema, dict):
        return schema
    moved = {key: value for key, value in schema.items() if key != "$id"}  # which would be a root of its own
    if "$ref" in moved:
        moved["$ref"] = place + moved["$ref"].removeprefix("#")
    for name in (*_SUBSCHEMAS, "items", *_SCHEMA_LISTS):
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
    def __init__(self, root: dict[str, Any] | bool, param: str) -> None:
        self._root = root
        self._param = param
        self._num_nodes = 1
        self._place: _Place = ("#", None)
        self._depth = 0
        self._left: list[tuple[Any, _Place, int]] = [(root, self._place, 0)]

    def slices(self) -> Iterator[None]:
        """Check subschema by subschema; yields whenever SLICE_S are over."""
        end = time.perf_counter() + SLICE_S
        while self._left:
            schema, self._place, self._depth = self._left.pop()
            if isinstance(schema, dict):
                for keyword, value in schema.items():
                    if keyword in _CHECKS:
                        _CHECKS[keyword](self, keyword, value)
            elif not isinstance(schema, bool):
                raise self._fault("a schema must be an object or a boolean")
            if time.perf_counter() > end:
                yield
                end = time.perf_counter() + SLICE_S

    def _add(self, children: Iterable[tuple[str, Any]], num_children: int) -> None:
        self._num_nodes += num_children
        if self._num_nodes > MAX_NODES:
            raise self._fault(f"more than {MAX_NODES} subschemas")
        if self._depth == MAX_DEPTH and num_children:
            raise self._fault(f"nested deeper than {MAX_DEPTH}")
        self._left += [(child, (name, self._place), self._depth + 1) for name, child in children]

    def _subschema(self, keyword: str, value: Any) -> None:
        self._add([(keyword, value)], 1)

    def _map_of_schemas(self, keyword: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise self._fault(f"{keyword} must be an object")
        self._add(((f"{keyword}/{name[:40]}", child) for name, child in value.items()), len(value))

    def _list_of_schemas(self, keyword: str, value: Any) -> None:
        if not isinstance(value, list) or not value:
            raise self._fault(f"{keyword} must be a non-empty list")
        self._add(((f"{keyword}/{index}", child) for index, child in enumerate(value)), len(value))

    def _items(self, keyword: str, value: Any) -> None:
        if value != []:
            (self._list_of_schemas if isinstance(value, list) else self._subschema)(keyword, value)

    def _type(self, _: str, value: Any) -> None:
        names = value if isinstance(value, list) else [value]
        if not names:
            raise self._fault("type is an empty list")
        for name in names:
            if not isinstance(name, str) or name not in _TYPES:
                raise self._fault(f"unknown type {str(name)[:40]!r}")

    def _enum(self, _: str, value: Any) -> None:
        if not isinstance(value, list) or not value:
            raise self._fault("enum must be a non-empty list")
        if len(value) > MAX_ENUM_VALUES:
            raise self._fault(f"enum has more than {MAX_ENUM_VALUES} values")

    def _count(self, keyword: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_REPEAT:
            raise self._fault(f"{keyword} must be a whole number from 0 to {MAX_REPEAT}")

    def _number(self, keyword: str, value: Any) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._fault(f"{keyword} must be a number")

    def _required(self, _: str, value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._fault("required must be a list of strings")

    def _pattern(self, _: str, value: Any) -> None:
        if not isinstance(value, str):
            raise self._fault("pattern must be a string")
        if len(value) > MAX_PATTERN_CHARS:
            raise self._fault(f"pattern is longer than {MAX_PATTERN_CHARS} characters")

    def _reference(self, _: str, value: Any) -> None:
        if not isinstance(value, str) or not value.startswith("#"):
            raise self._fault("only local $ref are supported")
        target: Any = self._root
        for part in filter(None, value[1:].split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or key not in target:
                raise self._fault(f"$ref {value[:80]!r} leads nowhere")
            target = target[key]

    def _fault(self, fault: str) -> ParameterError:
        parts = []
        place: _Place | None = self._place
        while place is not None:
            part, place = place
            parts.append(part)
        where = "/".join(reversed(parts))[:200]
        return ParameterError(self._param, f"{self._param}: not a JSON schema: {fault} (at {where}).")


_CHECKS: dict[str, Callable[[_Checker, str, Any], None]] = {
    "type": _Checker._type,
    "enum": _Checker._enum,
    "required": _Checker._required,
    "pattern": _Checker._pattern,
    "$ref": _Checker._reference,
    "items": _Checker._items,
    **dict.fromkeys(_COUNTS, _Checker._count),
    **dict.fromkeys(_NUMBERS, _Checker._number),
    **dict.fromkeys(_SUBSCHEMAS, _Checker._subschema),
    **dict.fromkeys(_SCHEMA_MAPS, _Checker._map_of_schemas),
    **dict.fromkeys(_SCHEMA_LISTS, _Checker._list_of_schemas),
}
