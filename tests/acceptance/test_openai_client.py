"""The openai package as the client of a server with the embedded model: chat and completions, streamed and not."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.serving import running_server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running_server() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as connected:
        yield connected


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_chat_answer_is_sensible_and_the_same_streamed(client: openai.OpenAI, model: str) -> None:
    arguments = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_completion_is_the_same_streamed(client: openai.OpenAI, model: str) -> None:
    arguments = {"model": model, "prompt": "The days of the week are", "temperature": 0, "max_tokens": 16}
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""


def test_a_seed_gives_the_same_answer_again_and_streamed(client: openai.OpenAI, model: str) -> None:
    arguments = {"model": model, "messages": QUESTION, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    texts = {client.chat.completions.create(**arguments).choices[0].message.content for _ in range(2)}
    stream = client.chat.completions.create(**arguments, stream=True)
    texts.add("".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices))
    assert len(texts) == 1


def test_bad_requests_raise_the_clients_own_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client.completions.create(model=model, prompt="word " * 20_000)
