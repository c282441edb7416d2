"""tools and tool_choice: checked, turned into a constraint where a call is required, and a parser for the answer."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tokring.sampling_params import ParameterError, StructuredOutput
from tokring.server.api_types import ChatFields, NamedToolChoice, ToolDefinition
from tokring.server.json_schema import check_json_schema
from tokring.server.structured_output import json_schema_constraint
from tokring.server.tool_parser import HermesParser, NamedCallParser, RequiredCallsParser, ToolParser

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request's tools come to: nothing (the default), or a parser and perhaps a constraint."""

    definitions: list[dict[str, Any]] | None = None  # for the chat template
    constraint: StructuredOutput | None = None
    new_parser: Callable[[], ToolParser] | None = None
    is_named: bool = False


def tool_use_of(request: ChatFields) -> ToolUse:
    """Raises ParameterError for malformed tools, or a tool_choice that they cannot serve."""
    tools = request.tools or []
    _check_tools(tools)
    choice = request.tool_choice or ("auto" if tools else "none")
    if not tools and (choice == "required" or isinstance(choice, NamedToolChoice)):
        raise ParameterError("tool_choice", "tool_choice asks for a call, but there are no tools.")
    if choice == "none":
        return ToolUse()
    definitions = [_definition(tool) for tool in tools] or None
    allows_several = request.parallel_tool_calls is not False
    if choice == "required":
        constraint = json_schema_constraint(_required_schema(tools, allows_several), "tools")
        return ToolUse(definitions, constraint, RequiredCallsParser)
    if isinstance(choice, NamedToolChoice):
        return _named_use(tools, choice.function.name, definitions)
    if not tools:
        return ToolUse()
    return ToolUse(definitions, None, lambda: HermesParser(allows_several=allows_several))


def _definition(tool: ToolDefinition) -> dict[str, Any]:
    """The tool as the client sent it, for the chat template."""
    function = {key: value for key, value in msgspec.to_builtins(tool.function).items() if value is not None}
    return {"type": tool.type, "function": function}


def _named_use(tools: list[ToolDefinition], name: str, definitions: list[dict[str, Any]] | None) -> ToolUse:
    for tool in tools:
        if tool.function.name == name:
            schema = tool.function.parameters or _NO_PARAMETERS
            return ToolUse(definitions, json_schema_constraint(schema, "tools"), lambda: NamedCallParser(name), True)
    raise ParameterError("tool_choice", f"tool_choice names the function {name[:64]!r}, which is not among the tools.")


def _check_tools(tools: list[ToolDefinition]) -> None:
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
            check_json_schema(tool.function.parameters, "tools")


def _required_schema(tools: list[ToolDefinition], allows_several: bool) -> dict[str, Any]:
    """A list of calls; $defs of the functions' schemas move to the top, where their $refs look for them."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or _NO_PARAMETERS)
        for key, definition in parameters.pop("$defs", {}).items():
            if definitions.setdefault(key, definition) != definition:
                raise ParameterError("tools", f"two tools define {key[:64]!r} in $defs differently.")
        name = {"type": "string", "enum": [tool.function.name]}
        properties = {"name": name, "parameters": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not allows_several:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema
