"""From a chat request's messages to what a chat template reads; refuses what is no conversation."""

from typing import Any

import orjson
from msgspec import UNSET

from tokring.server.api_types import ChatFields, ChatMessage, ToolCall
from tokring.server.chat_template import RESERVED_KWARGS, ChatTemplate
from tokring.server.errors import invalid_request
from tokring.server.json_text import JsonError, load_json
from tokring.server.prompt_encoder import Conversation
from tokring.server.tool_parser import TOOL_CALL_END, TOOL_CALL_START

MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS_BYTES = 65_536
ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PART_TYPES = ("text", "input_text", "output_text", "refusal")
_TOOLS_PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{definitions}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def conversation_of(
    request: ChatFields, tools: list[dict[str, Any]] | None, template: ChatTemplate | None
) -> Conversation:
    """Raises ApiError (400) naming the message."""
    messages = request.messages
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise invalid_request(f"messages needs 1 to {MAX_MESSAGES} messages, got {len(messages)}.", "messages")
    rendered = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    source = template.source if template is not None else ""
    if "developer" not in source:
        for message in rendered:
            if message["role"] == "developer":
                message["role"] = "system"
    if tools and "tools" not in source:
        rendered, tools = _with_tools_in_text(rendered, tools), None
    if "tool_calls" not in source:
        rendered = [_with_calls_in_text(message) for message in rendered]
    return Conversation(
        messages=rendered,
        tools=tools,
        documents=request.documents,
        add_generation_prompt=_generation_prompt(request),
        continue_final_message=bool(request.continue_final_message),
        template_kwargs=_template_kwargs(request),
    )


def _generation_prompt(request: ChatFields) -> bool:
    if not request.continue_final_message:
        return request.add_generation_prompt is not False
    if request.add_generation_prompt:
        raise invalid_request(
            "add_generation_prompt and continue_final_message exclude each other.", "continue_final_message"
        )
    return False


def _template_kwargs(request: ChatFields) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    for key in kwargs:
        if key in RESERVED_KWARGS:
            raise invalid_request(f"chat_template_kwargs must not set {key!r}.", "chat_template_kwargs")
    if len(orjson.dumps(kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
        raise invalid_request(
            f"chat_template_kwargs is longer than {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON.", "chat_template_kwargs"
        )
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    return kwargs


def _message(message: ChatMessage, place: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid_request(f"{place}.role must be one of {', '.join(ROLES)}, not {message.role[:40]!r}.", "messages")
    for field in ("audio", "function_call"):
        if getattr(message, field) is not None:
            raise invalid_request(f"{place}.{field} is not supported.", "messages", "unsupported_parameter")
    result: dict[str, Any] = {"role": message.role, "content": _content(message, place)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid_request(f"{place}.tool_calls: only an assistant calls tools.", "messages")
        result["tool_calls"] = [_tool_call(call, place) for call in message.tool_calls]
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    return result


def _content(message: ChatMessage, place: str) -> str:
    content = message.content
    if content is UNSET or content is None:
        if message.role != "assistant":
            raise invalid_request(f"{place}.content is missing.", "messages")
        return message.refusal or ""
    if isinstance(content, str):
        return content
    assert isinstance(content, list)
    return "\n".join(_part_text(part, f"{place}.content[{index}]") for index, part in enumerate(content))


def _part_text(part: str | dict[str, Any], place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind not in _TEXT_PART_TYPES:
        raise invalid_request(
            f"{place}: parts of type {str(kind)[:40]!r} are not supported; the model takes text only.", "messages"
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid_request(f"{place}.text must be a string.", "messages")
    return text


def _tool_call(call: ToolCall, place: str) -> dict[str, Any]:
    """Templates expect the arguments as an object; clients send them as JSON text."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = load_json(arguments) if arguments else {}
        except JsonError as error:
            raise invalid_request(
                f"{place}.tool_calls: arguments of {call.function.name[:64]!r} are {error}.", "messages"
            ) from None
    if not isinstance(arguments, dict):
        raise invalid_request(
            f"{place}.tool_calls: arguments of {call.function.name[:64]!r} must be a JSON object.", "messages"
        )
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _with_tools_in_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that know no tools: Hermes' own system text announces them."""
    definitions = "\n".join(orjson.dumps(tool).decode() for tool in tools)
    preamble = _TOOLS_PREAMBLE.format(definitions=definitions)
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{preamble}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": preamble}, *messages]


def _with_calls_in_text(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that know no tool calls: calls of the history as the model would have written them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [f"{TOOL_CALL_START}\n{orjson.dumps(call['function']).decode()}\n{TOOL_CALL_END}" for call in calls]
    content = "\n".join(filter(None, [message["content"], *texts]))
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
