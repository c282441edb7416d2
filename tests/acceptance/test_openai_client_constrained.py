"""The openai package's objects for structured output and tools; the server's made-up tokens obey the grammars."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.support.serving import mock_server

QUESTION: list[Any] = [{"role": "user", "content": "Where is it?"}]


class Place(pydantic.BaseModel):
    """Where a place is."""

    city: str = pydantic.Field(max_length=8)
    continent: Literal["Africa", "Asia", "Europe"]


TOOL = openai.pydantic_function_tool(Place, name="show_place")
ARGUMENTS: dict[str, Any] = {"model": "small", "messages": QUESTION, "temperature": 0, "max_tokens": 1000}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with mock_server("--served-model-name", "small") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as connected:
            yield connected


def test_structured_output_becomes_the_clients_object_whole_and_streamed(client: openai.OpenAI) -> None:
    place = client.chat.completions.parse(**ARGUMENTS, response_format=Place).choices[0].message.parsed
    assert isinstance(place, Place)
    with client.chat.completions.stream(**ARGUMENTS, response_format=Place) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == place


def test_required_tools_are_called_with_arguments_that_fit(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**ARGUMENTS, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "show_place" and isinstance(call.function.parsed_arguments, Place)
    history = [*QUESTION, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "shown"}]
    again = client.chat.completions.create(**{**ARGUMENTS, "messages": history, "max_tokens": 4}, tools=[TOOL])
    assert again.usage is not None and again.usage.completion_tokens == 4


def test_a_named_tools_arguments_arrive_in_pieces(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "show_place"}}
    with client.chat.completions.stream(**ARGUMENTS, tools=[TOOL], tool_choice=choice) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert len(pieces) > 1 and json.loads("".join(pieces)) == json.loads(call.function.arguments)
    assert isinstance(call.function.parsed_arguments, Place)


@pytest.mark.parametrize("pattern", ["[", "(?=a)b", r"(a)\1"])
def test_patterns_that_the_compiler_cannot_serve_are_refused_by_the_fields_name(
    client: openai.OpenAI, pattern: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("guided_regex", {"extra_body": {"guided_regex": pattern}}),
        ("response_format", {"response_format": response_format}),
        ("tools", {"tools": [tool], "tool_choice": "required"}),
    ]
    for param, fields in asked:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ARGUMENTS, **fields)
        assert (caught.value.param, caught.value.code) == (param, "invalid_grammar")


def test_patterns_speak_the_compilers_dialect(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ARGUMENTS, extra_body={"guided_regex": r"\p{Lu}{3}"})
    content = answer.choices[0].message.content
    assert content is not None and len(content) == 3 and content.isupper()
