"""Bad input is a 4xx that names the field, in OpenAI's error shape, before anything reaches the engine."""

import asyncio
import base64
import io
import re
from typing import Any

import pytest
from tests.server.harness import MODEL, Answer, Harness, served

from tokring.server import engine_client
from tokring.server.generation import Generation
from tokring.server.request_body import MAX_BYTES_ON_LOOP
from tokring.server.token_path import json_shape
from tokring.server.tokenize import MAX_CHARS
from tokring_ipc import ErrorCode

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


def check_error(answer: Answer, param: str | None = None, statuses: range = range(400, 500)) -> None:
    assert answer.status in statuses, answer.body
    assert answer.headers["Content-Type"].startswith("application/json")
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["message"] and answer.error["type"] and answer.error["code"]
    assert answer.headers["X-Request-Id"]
    if param is not None:
        assert answer.error["param"] == param, answer.error


COMPLETION_FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [999_999]}),
    ("prompt", {"prompt": [5, -1]}),
    ("prompt", {"prompt": [2**63]}),
    ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": [None]}),
    ("prompt", {"prompt": [[["x"]]]}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": 7}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": []}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": 0}),
    ("stop", {"stop": 5}),
    ("stop", {"stop": [1, 2]}),
    ("stop", {"stop": {"a": 1}}),
    ("stop", {"stop": [["x"]]}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": [str(n) for n in range(300)]}),
    ("stop_token_ids", {"stop_token_ids": [300]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": ["7"]}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 4}),
    ("n", {"n": 0}),
    ("n", {"n": 10**9}),
    ("n", {"n": 1.5}),
    ("n", {"n": 2**64}),
    ("n", {"n": 100}),  # more than can ever be in flight here
    ("best_of", {"best_of": 10**9}),
    ("best_of", {"n": 3, "best_of": 2}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": 10**6}),
    ("logprobs", {"logprobs": True}),
    ("logit_bias", {"logit_bias": {"300": 5}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"abc": 1}}),
    ("logit_bias", {"logit_bias": {"5": "x"}}),
    ("logit_bias", {"logit_bias": [1, 2]}),
    ("logit_bias", {"logit_bias": {"7": 1000}}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": 1e300}),
    ("top_p", {"top_p": 1.1}),
    ("top_p", {"top_p": "x"}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 1.5}),
    ("min_p", {"min_p": 5}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": []}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("seed", {"seed": "abc"}),
    ("seed", {"seed": 2**64}),
    ("stream", {"stream": []}),
    ("stream_options", {"stream": True, "stream_options": "x"}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("bad_words", {"bad_words": [" "]}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("guided_choice", {"guided_choice": []}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("guided_regex", {"guided_json": {}, "guided_regex": "a"}),
    ("suffix", {"suffix": "x"}),
    ("use_beam_search", {"use_beam_search": True}),
    ("prompt_embeds", {"prompt_embeds": "x"}),
    ("kv_transfer_params", {"kv_transfer_params": {}}),
    ("cache_salt", {"cache_salt": ""}),
    ("user", {"user": 5}),
    ("priority", {"priority": 1}),  # it would be ignored: first come, first served
]
GENERATE_FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("token_ids", {"token_ids": [999_999]}),
    ("token_ids", {"token_ids": []}),
    ("top_k", {"sampling_params": {"top_k": 1.5}}),
    ("logit_bias", {"sampling_params": {"logit_bias": {"5": None}}}),
    ("cache_salt", {"cache_salt": ""}),
    ("priority", {"priority": 1}),
]
CHAT_FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": {}}),
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": [5]}),
    ("messages", {"messages": [{"role": "user", "content": 5}]}),
    ("messages", {"messages": [{"content": "x"}]}),
    ("messages", {"messages": [{"role": 7, "content": "x"}]}),
    ("messages", {"messages": [{"role": "banana", "content": "x"}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": -1}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": "many"}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("response_format", {"response_format": "json"}),
    ("response_format", {"response_format": {}}),
    ("response_format", {"response_format": {"type": "banana"}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ("response_format", {"response_format": schema("str")}),
    ("response_format", {"response_format": schema([])}),
    ("response_format", {"response_format": schema({"type": "not-a-type"})}),
    ("response_format", {"response_format": schema({"properties": {"a": {"$ref": "#/$defs/none"}}})}),
    ("tools", {"tools": "x"}),
    ("tools", {"tools": [5]}),
    ("tools", {"tools": [{"type": "function"}], "tool_choice": "required"}),
    ("tools", {"tools": [{"type": "function", "function": {"name": 5}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "a b ü"}}]}),
    ("tools", {"tools": [TOOL, TOOL]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}]}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "banana"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": 5}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}),
    ("store", {"store": True}),
    ("audio", {"audio": {}}),
    ("modalities", {"modalities": ["audio"]}),
    ("functions", {"functions": [{}]}),
    ("echo", {"echo": True}),
    ("chat_template", {"chat_template": "{{ 1 }}"}),
    ("best_of", {"best_of": 2}),
]


@served()
async def test_completion_faults_are_refused_by_name(harness: Harness) -> None:
    for param, fields in COMPLETION_FAULTS:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 2, **fields}
        check_error(await harness.post(COMPLETION, body), param)
    assert harness.engine.all_requests == [] and harness.client.in_flight == 0


@served()
async def test_chat_faults_are_refused_by_name(harness: Harness) -> None:
    for param, fields in CHAT_FAULTS:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, **fields}
        check_error(await harness.post(CHAT, body), param)
    assert harness.engine.all_requests == [] and harness.client.in_flight == 0


@served()
async def test_faults_of_token_ids_and_text_are_refused_by_name(harness: Harness) -> None:
    for param, fields in GENERATE_FAULTS:
        check_error(await harness.post("/inference/v1/generate", {"token_ids": [5], **fields}), param)
    check_error(await harness.post("/detokenize", {"tokens": [999_999]}), "tokens")
    check_error(await harness.post("/tokenize", {"prompt": "hello", "chat_template": "{{ 1 }}"}), "chat_template")
    assert harness.engine.all_requests == []


@served()
async def test_a_refused_stream_is_a_plain_error(harness: Harness) -> None:
    for fields in ({"temperature": -1}, {"logit_bias": {"999": 1}}, {"n": 0}, {"stop": 5}):
        check_error(await harness.complete(stream=True, **fields), next(iter(fields)))


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_constraint_that_the_engine_refuses_is_a_400_before_the_headers(harness: Harness, stream: bool) -> None:
    answer = await harness.chat(response_format=schema({"const": "refuse-me"}), stream=stream)
    check_error(answer, "response_format", statuses=range(400, 401))
    assert re.fullmatch(
        r"The output constraint cannot be used: its text says refuse-me, in slot \d+ of generation 1\.",
        answer.error["message"],
    )
    await harness.all_slots_are_free()


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_503_of_the_engine_says_when_to_come_back(harness: Harness, stream: bool) -> None:
    harness.engine.refusal = ErrorCode.OVERLOADED  # as when the jobs that vet grammars are all busy
    answer = await harness.chat(response_format=schema({"const": "refuse-me"}), stream=stream)
    check_error(answer, statuses=range(503, 504))
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.error["message"].startswith("The engine can't take the request now: its text says refuse-me")


@served()
async def test_an_engine_that_does_not_say_why_it_refuses_keeps_nobody_waiting(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "EXPLAIN_TIMEOUT_S", 0.05)
    harness.engine.explains = False
    answer = await harness.chat(response_format=schema({"const": "refuse-me"}))
    check_error(answer, statuses=range(400, 401))
    assert answer.error["message"] == "The output constraint cannot be used."
    pending = asyncio.ensure_future(harness.chat(response_format=schema({"const": "refuse-me"})))
    monkeypatch.setattr(engine_client, "EXPLAIN_TIMEOUT_S", 1e6)
    while len(harness.engine.all_requests) < 2:
        await asyncio.sleep(0)
    harness.engine.die()
    check_error(await pending, statuses=range(400, 504))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("step", "num_done"), [("_open", 0), ("_open", 1), ("_submit", 0), ("_submit", 1)])
@served()
async def test_a_bug_at_any_step_of_a_submission_is_a_500_that_leaves_no_slot_taken(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, step: str, num_done: int, stream: bool
) -> None:
    original, calls = getattr(Generation, step), iter(range(num_done))

    def fails_later(*arguments: Any, **options: Any) -> None:
        if next(calls, None) is None:
            raise MemoryError("no memory for it")
        original(*arguments, **options)

    monkeypatch.setattr(Generation, step, fails_later)
    answer = await harness.complete(max_tokens=2, n=3, stream=stream)
    check_error(answer, statuses=range(500, 501))
    await harness.all_slots_are_free()


@served()
async def test_a_request_that_no_ring_could_hold_is_a_413(harness: Harness) -> None:
    huge = {"type": "string", "description": "x" * 262_000}
    for stream in (False, True):
        answer = await harness.complete(guided_json=huge, stream=stream, n=2)
        check_error(answer, statuses=range(413, 414))
    await harness.all_slots_are_free()
    assert (await harness.complete(max_tokens=2)).status == 200


@served()
async def test_null_means_default(harness: Harness) -> None:
    fields = "temperature top_p n stop seed logit_bias presence_penalty stream stream_options tools tool_choice user"
    nulls = dict.fromkeys([*fields.split(), "response_format", "logprobs", "top_logprobs", "metadata", "max_tokens"])
    body = {"model": MODEL, "messages": HELLO, **nulls, "max_completion_tokens": 3}
    answer = await harness.post(CHAT, body)
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 3


@served()
async def test_unknown_fields_do_no_harm(harness: Harness) -> None:
    extras: list[dict[str, Any]] = [
        {"foo": 1},
        {"__class__": "x"},
        {"self": 1},
        {"": 0},
        {"é": [[]]},
        {"cache_prompt": True},
        {"service_tier": "auto"},
        {"reasoning_effort": "low"},
        {"metadata": {"a": "b"}},
        {"user": "u" * 300},
    ]
    for extra in extras:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "temperature": 0, **extra}
        answer = await harness.post(CHAT, body)
        assert answer.status == 200, (extra, answer.body)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{",
        b"[1]",
        b"null",
        b'"x"',
        b"{'model':1}",
        b'{"prompt":"a",}',
        b"\0",
        b'{"prompt":"a"}{}',
        b"model=x&prompt=y",
        base64.b64decode("/v8iAP//"),
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"\\ud83d"}',
        b'{"prompt":"Hi","temperature":NaN}',
        b'{"prompt":"Hi","temperature":1e999}',
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ],
)
@served()
async def test_what_is_no_json_object_is_a_400(harness: Harness, data: bytes) -> None:
    for path in (CHAT, COMPLETION, "/tokenize", "/invocations"):
        answer = await harness.request("POST", path, data=data, headers={"Content-Type": "application/json"})
        check_error(answer, statuses=range(400, 401))


DEEP = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
    "fields",
    [
        f'"chat_template_kwargs": {{"x": {DEEP}}}',
        f'"unknown": {DEEP}',
        f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {{"examples": {DEEP}}}}}}}]',
        f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "s", "schema": {{"enum": {DEEP}}}}}}}',
        f'"guided_json": "{{\\"enum\\": {DEEP}}}"',
        f'"structured_outputs": {{"structural_tag": "{DEEP}"}}',
        '"unknown": [' + "[]," * 200_000 + "1]",
        '"unknown": [' + '"",' * 200_000 + "1]",
        '"unknown": [' + "1," * 500_000 + "1]",
        '"chat_template_kwargs": {"x": "' + "a" * 65_536 + '"}',
    ],
    ids=lambda fields: fields[:30],
)
@served()
async def test_json_too_deep_or_of_too_many_parts_is_a_400(harness: Harness, fields: str) -> None:
    data = f'{{"messages": [{{"role": "user", "content": "hello"}}], "max_tokens": 1, {fields}}}'.encode()
    answer = await harness.request("POST", CHAT, data=data, headers={"Content-Type": "application/json"})
    check_error(answer, statuses=range(400, 401))
    assert re.search("nested deeper|lists and objects|strings|values|longer than", answer.error["message"]), (
        answer.error
    )


@served()
async def test_arguments_of_a_call_in_the_history_nested_too_deep_are_a_400(harness: Harness) -> None:
    call = {"function": {"name": "f", "arguments": f'{{"x": {DEEP}}}'}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, *HELLO]
    check_error(await harness.post(CHAT, {"messages": messages}), "messages", range(400, 401))


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (b"", (0, 0, 0, 0)),
        (b'{"a": [1, 2, {}], "b": "x"}', (3, 3, 3, 3)),
        (b'["[,{\\",[", "\\\\", ""]', (1, 1, 3, 2)),
        (b'"never closed [[,', (0, 0, 1, 0)),
        (b'["ends in \\', (1, 1, 1, 0)),
        (b"]]]][", (1, 1, 0, 0)),
    ],
)
def test_the_shape_of_a_text_is_counted_outside_of_its_strings(text: bytes, shape: tuple[int, ...]) -> None:
    assert json_shape(text) == shape


@served()
async def test_a_body_of_megabytes_is_read_beside_the_loop(harness: Harness) -> None:
    data = b'{"prompt": "hello", "max_tokens": 1, "user": "' + b"a" * (MAX_BYTES_ON_LOOP + 1) + b'"'
    headers = {"Content-Type": "application/json"}
    answer = await harness.request("POST", COMPLETION, data=io.BytesIO(data + b"}"), headers=headers)
    assert answer.status == 200, answer.body
    answer = await harness.request("POST", COMPLETION, data=io.BytesIO(data + b',"x":' + b"[" * 300), headers=headers)
    check_error(answer, statuses=range(400, 401))


@served()
async def test_brackets_in_text_are_no_nesting(harness: Harness) -> None:
    answer = await harness.complete("hello", max_tokens=1, user='\\" [' * 150, stop=["[" * 200])
    assert answer.status == 200, answer.body


@served()
async def test_tokenizing_a_text_of_megabytes_is_a_400(harness: Harness) -> None:
    body = io.BytesIO(b'{"prompt": "' + b"a" * (MAX_CHARS + 1) + b'"}')
    answer = await harness.request("POST", "/tokenize", data=body, headers={"Content-Type": "application/json"})
    check_error(answer, "prompt", range(400, 401))


@served()
async def test_content_types_other_than_json_are_a_415(harness: Harness) -> None:
    data = b'{"prompt":"hello","max_tokens":1}'
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "x", ";"):
        check_error(await harness.request("POST", COMPLETION, data=data, headers={"Content-Type": kind}))
    for kind in ("application/json; charset=UTF-8", "application/JSON", "application/vnd.api+json"):
        answer = await harness.request("POST", COMPLETION, data=data, headers={"Content-Type": kind})
        assert answer.status == 200


@served(max_body_bytes=2000)
async def test_a_body_over_the_limit_is_a_413(harness: Harness) -> None:
    check_error(await harness.complete("x" * 3000), statuses=range(413, 414))


@served()
async def test_an_unknown_model_is_a_404(harness: Harness) -> None:
    for model in ("no-such-model", "no such/model ü", "x" * 5000):
        answer = await harness.post(COMPLETION, {"model": model, "prompt": "a"})
        check_error(answer, "model", range(404, 405))
        assert answer.error["code"] == "model_not_found" and len(answer.body) < 1000
    check_error(await harness.post(COMPLETION, {"model": 5, "prompt": "a"}), "model", range(400, 401))
    for model in (None, ""):
        answer = await harness.post(COMPLETION, {"model": model, "prompt": "a", "max_tokens": 1})
        assert answer.json["model"] == MODEL


@served()
async def test_a_prompt_over_the_context_says_so_in_the_words_proxies_match(harness: Harness) -> None:
    limit = harness.front_end.limits.max_model_len
    over: list[dict[str, Any]] = [
        {"prompt": [40] * limit, "max_tokens": 1},
        {"prompt": [40] * (limit * 4), "max_tokens": 1, "stream": True},
        {"prompt": [40] * 20, "max_tokens": limit},
        {"prompt": "yes no " * limit * 20, "max_tokens": 1},
    ]
    for fields in over:
        answer = await harness.post(COMPLETION, {"model": MODEL, **fields})
        check_error(answer, "prompt", range(400, 401))
        assert answer.error["code"] == "context_length_exceeded"
        assert answer.error["message"].startswith(f"This model's maximum context length is {limit} tokens")
        assert len(answer.body) < 1000
    check_error(await harness.chat("yes no " * limit), "messages", range(400, 401))


@served()
async def test_truncate_prompt_tokens_keeps_the_end(harness: Harness) -> None:
    answer = await harness.complete([40, 41, 42, 43], truncate_prompt_tokens=2, max_tokens=1)
    assert answer.json["usage"]["prompt_tokens"] == 2
    assert harness.engine.all_requests[-1].prompt == [42, 43]


@served()
async def test_a_truncated_prompt_is_echoed_as_it_was_computed(harness: Harness) -> None:
    answer = await harness.complete("hello world", truncate_prompt_tokens=1, max_tokens=1, echo=True, logprobs=0)
    [choice] = answer.json["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["text_offset"][1] == len(choice["logprobs"]["tokens"][0])
