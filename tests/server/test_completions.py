"""/v1/completions and /v1/chat/completions: streamed and whole answers agree, in text, ends, usage and logprobs."""

from typing import Any

import orjson
import pytest
from tests.server.harness import CHATML, MODEL, STORY, Answer, Harness, ids_of, says, served, tell_story, tiny_tokenizer

from tokring.server.chat_template import ChatTemplate

USAGE = {"include_usage": True}


def story_text(num_tokens: int) -> str:
    return str(tiny_tokenizer().decode(ids_of(STORY)[:num_tokens], skip_special_tokens=True))


async def both_ways(harness: Harness, path: str, body: dict[str, Any]) -> tuple[Answer, Answer]:
    """The same request whole and streamed; checks that they agree and returns both."""
    body = {"model": MODEL, **body}
    whole = await harness.post(path, body)
    streamed = await harness.post(path, {**body, "stream": True, "stream_options": USAGE})
    assert (whole.status, streamed.status) == (200, 200), (whole.body, streamed.body)
    assert whole.texts == streamed.texts
    assert whole.finish_reasons == streamed.finish_reasons
    usage = [chunk["usage"] for chunk in streamed.chunks if chunk.get("usage")]
    assert len(usage) == 1 and streamed.chunks[-1]["choices"] == []
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[0][key] == whole.json["usage"][key]
    return whole, streamed


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, **fields}


@served()
async def test_a_completion_ends_at_max_tokens(harness: Harness) -> None:
    whole, _ = await both_ways(harness, "/v1/completions", {"prompt": "hello", "temperature": 0, "max_tokens": 10})
    assert whole.text == story_text(10)
    assert whole.finish_reasons == ["length"]
    assert whole.json["usage"]["completion_tokens"] == 10
    assert whole.json["usage"]["prompt_tokens"] == len(ids_of("hello"))
    assert whole.json["object"] == "text_completion" and whole.json["id"].startswith("cmpl-")


@served()
async def test_completions_default_to_16_tokens_and_chats_to_what_is_left(harness: Harness) -> None:
    completion, chat = await harness.complete(), await harness.chat()
    assert completion.json["usage"]["completion_tokens"] == 16
    assert chat.json["usage"]["total_tokens"] == harness.front_end.limits.max_model_len


@served(says("The answer."))
async def test_end_of_text_is_a_stop_and_not_shown(harness: Harness) -> None:
    whole, streamed = await both_ways(harness, "/v1/chat/completions", chat_body())
    assert whole.text == "The answer."
    assert whole.finish_reasons == ["stop"]
    assert whole.json["usage"]["completion_tokens"] == len(ids_of("The answer.")) + 1
    roles = [chunk for chunk in streamed.chunks for choice in chunk["choices"] if choice["delta"].get("role")]
    assert len(roles) == 1 and streamed.chunks[0]["choices"][0]["delta"]["role"] == "assistant"


@served()
async def test_chunks_of_a_stream_share_id_object_and_time(harness: Harness) -> None:
    answer = await harness.chat(max_tokens=6, stream=True)
    assert {chunk["object"] for chunk in answer.chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in answer.chunks}) == 1
    assert all(chunk["choices"] and "usage" not in chunk for chunk in answer.chunks)
    assert answer.headers["X-Accel-Buffering"] == "no" and answer.headers["Cache-Control"] == "no-cache"


@served()
async def test_continuous_usage_counts_up(harness: Harness) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await harness.complete(max_tokens=5, stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in answer.chunks]
    assert counts == sorted(counts) and counts[-1] == 5 == answer.chunks[-2]["usage"]["completion_tokens"]


@pytest.mark.parametrize("start", [2, 6, 11])
@served()
async def test_a_stop_string_is_cut_wherever_token_borders_are(harness: Harness, start: int) -> None:
    full = story_text(24)
    stop = full[start : start + 4]
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 24, "stop": [stop]}
    whole, _ = await both_ways(harness, "/v1/completions", body)
    assert whole.text == full[: full.find(stop)]
    assert whole.finish_reasons == ["stop"]
    assert whole.json["choices"][0]["stop_reason"] == stop
    await harness.all_slots_are_free()


@served()
async def test_a_stop_string_can_be_kept(harness: Harness) -> None:
    stop = story_text(24)[5:8]
    answer = await harness.complete(max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert answer.text == story_text(24)[: story_text(24).find(stop) + 3]


@served()
async def test_held_back_text_is_flushed_when_no_stop_string_completes(harness: Harness) -> None:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "stop": [story_text(12)[-4:] + "never"]}
    whole, _ = await both_ways(harness, "/v1/completions", body)
    assert whole.text == story_text(12) and whole.finish_reasons == ["length"]


@served()
async def test_a_stop_token_id_ends_the_answer_and_is_named(harness: Harness) -> None:
    tokens = ids_of(STORY)
    answer = await harness.complete(max_tokens=24, stop_token_ids=[tokens[4]])
    end = tokens.index(tokens[4])
    assert answer.text == story_text(end)
    assert answer.json["choices"][0]["stop_reason"] == tokens[4]


@served()
async def test_an_unfinished_character_becomes_one_replacement_at_the_end(harness: Harness) -> None:
    emoji_at = next(n for n in range(60) if "\ufffd" in story_text(n))
    body = {"prompt": "hello", "temperature": 0, "max_tokens": emoji_at}
    whole, _ = await both_ways(harness, "/v1/completions", body)
    assert whole.text.rstrip("\ufffd") == STORY[: len(whole.text.rstrip("\ufffd"))]


@served()
async def test_several_choices_differ_and_come_in_order(harness: Harness) -> None:
    body = chat_body(temperature=1.0, seed=5, n=3, max_tokens=6)
    whole, _ = await both_ways(harness, "/v1/chat/completions", body)
    assert len(set(whole.texts)) == 3
    assert [choice["index"] for choice in whole.json["choices"]] == [0, 1, 2]
    assert whole.json["usage"]["completion_tokens"] == 18


@served()
async def test_lists_of_prompts_with_echo(harness: Harness) -> None:
    body = {"prompt": ["alpha one", "beta two"], "n": 2, "echo": True, "temperature": 0.9, "seed": 3, "max_tokens": 4}
    whole, _ = await both_ways(harness, "/v1/completions", body)
    assert [text[:5] for text in whole.texts] == ["alpha", "alpha", "beta ", "beta "]
    assert whole.json["usage"]["prompt_tokens"] == len(ids_of("alpha one")) + len(ids_of("beta two"))


@served()
async def test_prompts_of_token_ids_are_echoed_as_text(harness: Harness) -> None:
    ids = ids_of("🦙你")
    answer = await harness.complete(ids, echo=True, max_tokens=1)
    assert answer.text.startswith("🦙你") and answer.json["usage"]["prompt_tokens"] == len(ids)


@served()
async def test_completion_logprobs_agree_in_both_modes(harness: Harness) -> None:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    whole, streamed = await both_ways(harness, "/v1/completions", body)
    logprobs = whole.json["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == whole.text
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    pieces = [choice["logprobs"] for chunk in streamed.chunks for choice in chunk["choices"] if choice["logprobs"]]
    for key, values in logprobs.items():
        assert [value for piece in pieces for value in piece[key]] == values


@served()
async def test_chat_logprobs_agree_in_both_modes(harness: Harness) -> None:
    whole, streamed = await both_ways(
        harness, "/v1/chat/completions", chat_body(logprobs=True, top_logprobs=5, max_tokens=7)
    )
    entries = whole.json["choices"][0]["logprobs"]["content"]
    pieces = [choice["logprobs"] for chunk in streamed.chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for piece in pieces for entry in piece["content"]] == entries
    assert len(entries) == 7 and all(len(entry["top_logprobs"]) == 5 for entry in entries)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == whole.text


@served()
async def test_echo_with_logprobs_covers_the_prompt(harness: Harness) -> None:
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 2, "echo": True, "logprobs": 2}
    whole, streamed = await both_ways(harness, "/v1/completions", body)
    logprobs = whole.json["choices"][0]["logprobs"]
    num_prompt = whole.json["usage"]["prompt_tokens"]
    assert {len(values) for values in logprobs.values()} == {num_prompt + 2}
    assert logprobs["token_logprobs"][0] is None and logprobs["token_logprobs"][1] == -0.5
    assert "".join(logprobs["tokens"]) == whole.text == "the cat" + story_text(2)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@served()
async def test_an_echo_alone_scores_the_prompt(harness: Harness) -> None:
    answer = await harness.complete("the cat", max_tokens=0, echo=True, logprobs=1)
    assert answer.text == "the cat" and answer.json["usage"]["completion_tokens"] == 0
    assert len(answer.json["choices"][0]["logprobs"]["tokens"]) == answer.json["usage"]["prompt_tokens"]


@served()
async def test_prompt_logprobs_as_vllm_has_them(harness: Harness) -> None:
    answer = await harness.complete("the cat", max_tokens=1, prompt_logprobs=1)
    [first, *rest] = answer.json["choices"][0]["prompt_logprobs"]
    assert first is None and len(rest) == len(ids_of("the cat")) - 1
    assert all(entry["logprob"] == -0.5 and entry["rank"] == 1 for row in rest for entry in row.values())


@served()
async def test_best_of_returns_the_likeliest(harness: Harness) -> None:
    answer = await harness.complete(temperature=1.0, seed=1, n=1, best_of=3, max_tokens=4)
    assert len(answer.texts) == 1
    assert answer.json["usage"]["completion_tokens"] == 12
    assert (await harness.complete(n=1, best_of=3, stream=True)).error["param"] == "best_of"


@served()
async def test_token_ids_are_returned_on_request(harness: Harness) -> None:
    tokens = ids_of(STORY)[:4]
    whole = await harness.complete(max_tokens=4, return_token_ids=True)
    assert whole.json["choices"][0]["token_ids"] == tokens
    assert whole.json["choices"][0]["prompt_token_ids"] == ids_of("hello")
    streamed = await harness.complete(max_tokens=4, return_token_ids=True, stream=True)
    found = [token for chunk in streamed.chunks for token in chunk["choices"][0].get("token_ids") or []]
    assert found == tokens


@served()
async def test_min_tokens_holds_against_stop_strings(harness: Harness) -> None:
    answer = await harness.complete(max_tokens=12, min_tokens=10, stop=[story_text(12)[2:5]])
    assert answer.json["usage"]["completion_tokens"] >= 10


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL_TEXT = 'Look:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def tool_calls(answer: Answer) -> list[tuple[str, str]]:
    if answer.headers["Content-Type"] == "application/json":
        calls = answer.json["choices"][0]["message"].get("tool_calls") or []
        return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    found: dict[int, list[str]] = {}
    for chunk in answer.chunks:
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls") or []:
                entry = found.setdefault(call["index"], ["", ""])
                entry[0] += call["function"].get("name") or ""
                entry[1] += call["function"].get("arguments") or ""
    return [(name, arguments) for name, arguments in found.values()]


@served(says(CALL_TEXT))
async def test_a_tool_call_in_hermes_format_is_parsed(harness: Harness) -> None:
    whole, streamed = await both_ways(harness, "/v1/chat/completions", chat_body(tools=TOOLS))
    assert tool_calls(whole) == tool_calls(streamed) == [("get_weather", '{"city": "Rome"}')]
    assert whole.text == "Look:" and whole.finish_reasons == ["tool_calls"]


TWO_CALLS = "".join(f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>\n' for value in (1, 2))


@served(says(TWO_CALLS))
async def test_several_calls_have_an_index_and_an_id_each(harness: Harness) -> None:
    harness.front_end.model.encoder.chat_template = ChatTemplate(CHATML + "{# tools: none shown, to be short #}", {})
    whole, streamed = await both_ways(harness, "/v1/chat/completions", chat_body(tools=TOOLS, n=2))
    calls = [("f", '{"a": 1}'), ("f", '{"a": 2}')]
    assert tool_calls(whole) == calls and whole.finish_reasons == ["tool_calls"] * 2
    ids = [call["id"] for choice in whole.json["choices"] for call in choice["message"]["tool_calls"]]
    ids += [
        call["id"]
        for chunk in streamed.chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls") or []
        if "id" in call
    ]
    assert len(set(ids)) == len(ids) == 8
    one = chat_body(tools=TOOLS, parallel_tool_calls=False)
    whole, streamed = await both_ways(harness, "/v1/chat/completions", one)
    assert tool_calls(whole) == tool_calls(streamed) == calls[:1]


@served(says(CALL_TEXT))
async def test_arguments_are_streamed_while_the_call_is_still_written(harness: Harness) -> None:
    harness.engine.hold()
    body = chat_body(model=MODEL, tools=TOOLS, stream=True)
    async with harness.session.post(harness.url + "/v1/chat/completions", json=body) as answer:
        harness.engine.allow(len(ids_of(CALL_TEXT[: CALL_TEXT.index("Rome") + 2])))
        arguments = ""
        while not arguments.startswith('{"city": "R'):
            line = await answer.content.readline()
            for call in orjson.loads(line[6:])["choices"][0]["delta"].get("tool_calls", []) if line.strip() else []:
                arguments += call["function"]["arguments"]
        assert not arguments.endswith("}")
        harness.engine.go_on()
        await answer.read()


@served(says(CALL_TEXT))
async def test_a_call_that_is_cut_short_ends_by_its_length(harness: Harness) -> None:
    body = chat_body(tools=TOOLS, max_tokens=len(ids_of(CALL_TEXT)) - 12)
    whole, streamed = await both_ways(harness, "/v1/chat/completions", body)
    assert whole.finish_reasons == ["length"] and tool_calls(whole) == tool_calls(streamed)
    assert tool_calls(whole)[0][0] == "get_weather"


@served(says(CALL_TEXT))
async def test_tool_choice_none_leaves_the_text_alone(harness: Harness) -> None:
    whole, _ = await both_ways(harness, "/v1/chat/completions", chat_body(tools=TOOLS, tool_choice="none"))
    assert whole.text == CALL_TEXT and tool_calls(whole) == []


@served(says('{"city": "Rome"}'))
async def test_a_named_tool_is_called_with_the_constrained_text(harness: Harness) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    whole, streamed = await both_ways(harness, "/v1/chat/completions", chat_body(tools=TOOLS, tool_choice=choice))
    assert tool_calls(whole) == tool_calls(streamed) == [("get_weather", '{"city": "Rome"}')]
    assert whole.finish_reasons == ["stop"]
    assert harness.engine.all_requests[-1].extensions != {}


@served(says('[{"name": "get_weather", "parameters": {"city": "Rome"}}]'))
async def test_required_calls_are_parsed_from_the_constrained_list(harness: Harness) -> None:
    whole, streamed = await both_ways(harness, "/v1/chat/completions", chat_body(tools=TOOLS, tool_choice="required"))
    assert tool_calls(whole) == tool_calls(streamed) == [("get_weather", '{"city": "Rome"}')]
    assert whole.finish_reasons == ["tool_calls"]


@served()
async def test_tokenize_and_detokenize_are_inverse(harness: Harness) -> None:
    tokens = (await harness.post("/tokenize", {"prompt": "the cat"})).json
    assert tokens["tokens"] == ids_of("the cat") and tokens["count"] == len(tokens["tokens"])
    assert (await harness.post("/detokenize", {"tokens": tokens["tokens"]})).json == {"prompt": "the cat"}
    messages = [{"role": "user", "content": "hello"}]
    chat = (await harness.post("/tokenize", {"messages": messages})).json
    rendered = (await harness.post("/v1/chat/completions/render", {"messages": messages})).json
    assert chat["tokens"] == rendered["prompt_token_ids"] == ids_of(rendered["prompt"])


@served()
async def test_generate_takes_and_gives_token_ids(harness: Harness) -> None:
    body = {"token_ids": ids_of("hello"), "sampling_params": {"temperature": 0, "max_tokens": 4}}
    answer = await harness.post("/inference/v1/generate", body)
    assert answer.json["choices"][0]["token_ids"] == ids_of(STORY)[:4]


@served()
async def test_invocations_serve_both_kinds(harness: Harness) -> None:
    chat = await harness.post("/invocations", chat_body(max_tokens=2))
    completion = await harness.post("/invocations", {"prompt": "hello", "temperature": 0, "max_tokens": 2})
    assert chat.json["object"] == "chat.completion" and completion.json["object"] == "text_completion"


def test_the_story_has_what_the_tests_need() -> None:
    assert len(ids_of(STORY)) > 24 and tell_story is not None


@served()
async def test_a_stream_begins_with_the_logprobs_of_every_prompt_however_late_they_come(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokring.server.answer.MAX_HEADER_DELAY_S", 0.01)
    monkeypatch.setattr("tokring.server.answer.PING_AFTER_NS", 10_000_000)
    body = {"prompt": ["the cat", "sat on"], "temperature": 0, "max_tokens": 2, "echo": True, "logprobs": 1}
    whole = (await harness.post("/v1/completions", body)).json
    harness.engine.hold()
    async with harness.session.post(harness.url + "/v1/completions", json={**body, "stream": True}) as response:
        assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
        harness.engine.allow(1)  # the first of both begins
        await harness.until(lambda: any(request.num_done for request in harness.engine.requests))
        harness.engine.go_on()
        answer = Answer(response.status, response.headers, await response.read())
    for choice in whole["choices"]:
        parts = [part for chunk in answer.chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
        values = [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert tokens == choice["logprobs"]["tokens"] and values == choice["logprobs"]["token_logprobs"]


@served()
async def test_a_failure_behind_early_headers_is_an_error_event(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokring.server.answer.MAX_HEADER_DELAY_S", 0.01)
    harness.engine.hold()
    body = {"prompt": "the cat", "max_tokens": 2, "prompt_logprobs": 0, "stream": True}
    async with harness.session.post(harness.url + "/v1/completions", json=body) as response:
        assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
        harness.engine.die()
        answer = Answer(response.status, response.headers, await response.read())
    assert answer.chunks[-1]["error"]["code"] == "engine_dead"
    await harness.all_slots_are_free()


@pytest.mark.parametrize("stream", [False, True])
@served(max_in_flight=1024)
async def test_prompts_that_do_not_fit_into_the_ring_at_once_are_all_answered(harness: Harness, stream: bool) -> None:
    prompts = [[5 + number % 5] * 490 for number in range(700)]  # more than the ring holds
    answer = await harness.complete(prompts, max_tokens=1, stream=stream, temperature=0)
    assert answer.status == 200 and len(answer.finish_reasons) == 700
    assert sorted(request.prompt for request in harness.engine.all_requests) == sorted(prompts)
    await harness.all_slots_are_free()


@pytest.mark.parametrize(("default", "expected"), [(None, 16), (30, 30), (10_000, 412)])
def test_a_default_length_is_never_more_than_the_context_leaves(default: int | None, expected: int) -> None:
    @served(default_max_tokens=default)
    async def run(harness: Harness) -> None:
        limit = harness.front_end.limits.max_model_len
        near = await harness.post("/v1/completions", {"prompt": [40] * (limit - 5), "ignore_eos": True})
        assert near.json["usage"]["completion_tokens"] == 5
        await harness.post("/v1/completions", {"prompt": [40] * (limit - 412), "ignore_eos": True, "min_tokens": 4})
        assert harness.engine.all_requests[-1].max_tokens == expected
        await harness.post("/v1/completions", {"prompt": [40], "min_tokens": 40})
        assert harness.engine.all_requests[-1].max_tokens == min(max(default or 16, 40), limit - 1)
        chat = await harness.chat(min_tokens=40)
        assert chat.status == 200
        assert harness.engine.all_requests[-1].max_tokens == min(
            max(default or limit, 40), limit - chat.json["usage"]["prompt_tokens"]
        )

    run()
