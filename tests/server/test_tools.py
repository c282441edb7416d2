"""What tools and tool_choice let the model write: the engine's own compiler holds texts against the constraints."""

import asyncio
import json
from typing import Any

import pytest
from tests.server.harness import EOS_ID, Harness, ids_of, says, served, tiny_tokenizer

from tokring.engine.grammar import GrammarTokenizer
from tokring.engine.grammar_text import llguidance_grammar
from tokring.server.api_types import ChatFields, ChatMessage, FunctionDefinition, ToolDefinition
from tokring.server.tools import tool_use_of
from tokring_ipc import ExtensionKind

NODE = {
    "type": "object",
    "properties": {"value": {"$ref": "#/definitions/value"}, "next": {"$ref": "#"}},
    "required": ["value"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any], strict: bool | None = None) -> ToolDefinition:
    return ToolDefinition(type="function", function=FunctionDefinition(name=name, parameters=parameters, strict=strict))


def node(kind: str) -> dict[str, Any]:
    """A list's node that holds a value of this type; refers to itself and to definitions of its own."""
    return {**NODE, "definitions": {"value": {"type": kind}}, "$id": "https://example.com/node"}


def allows(kind: ExtensionKind, constraint: str, text: str) -> bool:
    """Whether an output under the constraint may be this text, to its end."""
    tokenizer = GrammarTokenizer(tiny_tokenizer().to_str(), tiny_tokenizer().get_vocab_size(), [EOS_ID])
    matcher = tokenizer.compile(llguidance_grammar(kind, constraint))
    ids = ids_of(text)
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("name", "parameters", "is_allowed"),
    [
        ("count", {"value": 1}, True),
        ("count", {"value": 1, "next": {"value": 2, "next": {"value": 3}}}, True),
        ("count", {"value": "one"}, False),
        ("count", {"value": 1, "next": {"value": "two"}}, False),
        ("count", {"value": 1, "next": [{"name": "count", "parameters": {"value": 1}}]}, False),
        ("spell", {"value": "one", "next": {"value": "two"}}, True),
        ("spell", {"value": 1}, False),
        ("other", {"value": 1}, False),
    ],
)
def test_required_calls_follow_each_functions_own_definitions(
    name: str, parameters: dict[str, Any], is_allowed: bool
) -> None:
    messages = [ChatMessage(role="user", content="hello")]
    tools = [tool("count", node("integer")), tool("spell", node("string"))]
    constraint = asyncio.run(tool_use_of(ChatFields(messages=messages, tools=tools, tool_choice="required"))).constraint
    assert constraint is not None
    text = json.dumps([{"name": name, "parameters": parameters}])
    assert allows(ExtensionKind.GRAMMAR_JSON_SCHEMA, constraint.text, text) == is_allowed


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("Hello there.", True),
        ('<tool_call>\n{"name": "count", "arguments": {"value": 1, "next": {"value": 2}}}\n</tool_call>', True),
        ('so: <tool_call>\n{"name": "count", "arguments": {"value": 1}}\n</tool_call> and', True),
        ('<tool_call>\n{"name": "count", "arguments": {"value": "one"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "loose", "arguments": {"value": "one"}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "count"', False),
    ],
)
def test_a_strict_function_is_called_as_its_schema_says_or_not_at_all(text: str, is_allowed: bool) -> None:
    messages = [ChatMessage(role="user", content="hello")]
    tools = [tool("count", node("integer"), strict=True), tool("loose", node("integer"))]
    use = asyncio.run(tool_use_of(ChatFields(messages=messages, tools=tools)))
    assert use.constraint is None and use.call_constraint is not None
    assert allows(ExtensionKind.GRAMMAR_STRUCTURAL_TAG, use.call_constraint.text, text) == is_allowed


@served(says('<tool_call>\n{"name": "count", "arguments": {"value": 1}}\n</tool_call>'))
async def test_strict_functions_constrain_an_answer_unless_its_format_does(harness: Harness) -> None:
    strict = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}, "strict": True}}
    answer = await harness.chat(tools=[strict])
    [choice] = answer.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "count", "arguments": '{"value": 1}'}
    await harness.chat(tools=[strict], response_format={"type": "json_object"})
    loose = {"type": "function", "function": {"name": "count", "strict": False}}
    await harness.chat(tools=[loose])
    kinds = [set(request.extensions) for request in harness.engine.all_requests]
    tag, json_object = int(ExtensionKind.GRAMMAR_STRUCTURAL_TAG), int(ExtensionKind.GRAMMAR_JSON_OBJECT)
    assert tag in kinds[0] and json_object in kinds[1] and tag not in kinds[1] | kinds[2]


CALLS = 'So:\n<tool_call>\n{"name": "count", "arguments": {"value": 1}}\n</tool_call>'


@served(says(CALLS))
async def test_streamed_calls_bring_every_token_id_and_count_all_along(harness: Harness) -> None:
    tools = [{"type": "function", "function": {"name": "count"}}]
    fields = {"tools": tools, "logprobs": True, "return_token_ids": True}
    whole = (await harness.chat(**fields)).json
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = (await harness.chat(**fields, stream=True, stream_options=options)).chunks
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token_id for part in parts for token_id in part.get("token_ids", [])]
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert ids == whole["choices"][0]["token_ids"] and entries == whole["choices"][0]["logprobs"]["content"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == whole["usage"]["completion_tokens"]


@served(says(CALLS))
async def test_streamed_calls_bring_every_token_id_without_logprobs(harness: Harness) -> None:
    fields = {"tools": [{"type": "function", "function": {"name": "count"}}], "return_token_ids": True}
    whole = (await harness.chat(**fields)).json
    chunks = (await harness.chat(**fields, stream=True)).chunks
    ids = [token_id for chunk in chunks for part in chunk["choices"] for token_id in part.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
