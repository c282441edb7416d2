"""The `openai` Python client gets what it expects: answers, streams, tools, structured output, its own exceptions."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from tests.server.harness import MODEL, Harness, says, served

MESSAGES: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@asynccontextmanager
async def client_of(harness: Harness, api_key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=harness.url + "/v1", api_key=api_key, max_retries=0) as client:
        yield client


@served()
async def test_chat_answers_are_equal_streamed_and_whole(harness: Harness) -> None:
    async with client_of(harness) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]


@served()
async def test_completions_are_equal_streamed_and_whole(harness: Harness) -> None:
    async with client_of(harness) as client:
        whole = await client.completions.create(model=MODEL, prompt="hello", max_tokens=9, temperature=0, logprobs=2)
        stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=9, temperature=0, stream=True)
        text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert text == whole.choices[0].text
    assert whole.choices[0].logprobs is not None and len(whole.choices[0].logprobs.tokens or []) == 9


@served(says('<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'))
async def test_tool_calls_arrive_streamed_and_whole(harness: Harness) -> None:
    async with client_of(harness) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, temperature=0)
        [call] = whole.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=TOOLS, temperature=0, stream=True
        )
        deltas = [
            delta async for chunk in stream for choice in chunk.choices for delta in choice.delta.tool_calls or []
        ]
    assert deltas[0].function is not None and deltas[0].function.name == "get_weather" and deltas[0].id
    assert "".join(delta.function.arguments or "" for delta in deltas if delta.function) == '{"city": "Rome"}'


@served(says('{"city": "Rome"}'))
async def test_structured_output_reaches_the_engine_as_a_schema(harness: Harness) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    async with client_of(harness) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format=response_format, temperature=0
        )
    assert answer.choices[0].message.content == '{"city": "Rome"}'
    [data] = harness.engine.all_requests[-1].extensions.values()
    assert b'"required":["city"]' in data


@served(api_key=("secret",))
async def test_errors_become_the_clients_exceptions(harness: Harness) -> None:
    async with client_of(harness) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with client_of(harness, "secret") as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="none", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=MODEL, prompt=[40] * 600)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as invalid:
            await client.completions.create(model=MODEL, prompt="a", temperature=-1)
        assert invalid.value.param == "temperature"
