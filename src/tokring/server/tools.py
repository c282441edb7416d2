"""tools and tool_choice: checked, turned into a constraint where a call is required, and a parser for the answer."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from tokring.sampling_params import ParameterError, StructuredKind, StructuredOutput
from tokring.server.api_types import ChatFields, NamedToolChoice, ToolDefinition
from tokring.server.json_schema import check_json_schema, moved_json_schema
from tokring.server.structured_output import json_schema_constraint
from tokring.server.tool_parser import (
    TOOL_CALL_END,
    TOOL_CALL_START,
    HermesParser,
    NamedCallParser,
    RequiredCallsParser,
    ToolParser,
)

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_ANY_PARAMETERS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request's tools come to: nothing (the default), or a parser and perhaps a constraint."""

    definitions: list[dict[str, Any]] | None = None  # for the chat template
    constraint: StructuredOutput | None = None  # to a call
    call_constraint: StructuredOutput | None = None  # of a call, if the model makes one
    new_parser: Callable[[], ToolParser] | None = None
    is_named: bool = False


async def tool_use_of(request: ChatFields) -> ToolUse:
    """Raises ParameterError for malformed tools, or a tool_choice that they cannot serve."""
    tools = request.tools or []
    await _check_tools(tools)
    choice = request.tool_choice or ("auto" if tools else "none")
    if not tools and (choice == "required" or isinstance(choice, NamedToolChoice)):
        raise ParameterError("tool_choice", "tool_choice asks for a call, but there are no tools.")
    if choice == "none":
        return ToolUse()
    definitions = [_definition(tool) for tool in tools] or None
    allows_several = request.parallel_tool_calls is not False
    if choice == "required":
        constraint = await json_schema_constraint(_required_schema(tools, allows_several), "tools")
        return ToolUse(definitions, constraint, new_parser=RequiredCallsParser)
    if isinstance(choice, NamedToolChoice):
        return await _named_use(tools, choice.function.name, definitions)
    if not tools:
        return ToolUse()
    return ToolUse(
        definitions,
        call_constraint=_strict_calls(tools),
        new_parser=lambda: HermesParser(allows_several=allows_several),
    )


def _definition(tool: ToolDefinition) -> dict[str, Any]:
    """The tool as the client sent it, for the chat template."""
    function = {key: value for key, value in msgspec.to_builtins(tool.function).items() if value is not None}
    return {"type": tool.type, "function": function}


async def _named_use(tools: list[ToolDefinition], name: str, definitions: list[dict[str, Any]] | None) -> ToolUse:
    for tool in tools:
        if tool.function.name == name:
            schema = tool.function.parameters or _NO_PARAMETERS
            constraint = await json_schema_constraint(schema, "tools")
            return ToolUse(definitions, constraint, new_parser=lambda: NamedCallParser(name), is_named=True)
    raise ParameterError("tool_choice", f"tool_choice names the function {name[:64]!r}, which is not among the tools.")


async def _check_tools(tools: list[ToolDefinition]) -> None:
    if len(tools) > MAX_TOOLS:
        raise ParameterError("tools", f"at most {MAX_TOOLS} tools are allowed, got {len(tools)}.")
    names = [tool.function.name for tool in tools]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ParameterError("tools", f"a function name must be 1 to 64 of A-Z a-z 0-9 _ . -, not {name[:64]!r}.")
    if len(set(names)) != len(names):
        raise ParameterError("tools", "two tools have the same function name.")
    for tool in tools:
        if tool.defer_loading or tool.function.defer_loading:
            raise ParameterError("tools", "defer_loading is not supported: there is no search for tools.")
        if tool.function.parameters is not None:
            await check_json_schema(tool.function.parameters, "tools")


def _required_schema(tools: list[ToolDefinition], allows_several: bool) -> dict[str, Any]:
    """A list of calls. Each function's own schema is one of $defs, where its references find what they mean."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        name, place = tool.function.name, f"#/$defs/{tool.function.name}"
        definitions[name] = moved_json_schema(tool.function.parameters or _NO_PARAMETERS, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": {"$ref": place}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    if not allows_several:
        schema["maxItems"] = 1
    return schema


def _strict_calls(tools: list[ToolDefinition]) -> StructuredOutput | None:
    """`strict` of a function: whatever the model writes around it, a call's arguments are what its schema says."""
    if not any(tool.function.strict for tool in tools):
        return None
    structures = [
        {
            "begin": f'{TOOL_CALL_START}\n{{"name": "{tool.function.name}", "arguments": ',
            "schema": (tool.function.strict and tool.function.parameters) or _ANY_PARAMETERS,
            "end": f"}}\n{TOOL_CALL_END}",
        }
        for tool in tools
    ]
    text = orjson.dumps({"structures": structures, "triggers": [TOOL_CALL_START]}).decode()
    return StructuredOutput(StructuredKind.STRUCTURAL_TAG, text, "tools")
