"""Every request field that OpenAI or vLLM documents for text models: honoured, refused by its name, or a known hint."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai.types as openai_types
import openai.types.chat as openai_chat_types
import pytest
from tests.server.harness import MODEL, STORY, Answer, Harness, ids_of, served, tell_story, tiny_tokenizer

from tokring.server.api_types import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tokring.server.chat_template import ChatTemplate
from tokring.server.generate import GenerateRequest, SamplingFields
from tokring_ipc import ExtensionKind

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RENDER, TOKENIZE, DETOKENIZE = "/v1/chat/completions/render", "/tokenize", "/detokenize"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{{ documents }} {{ reasoning_effort }} {{ colour }} {{ tools }}{% if add_generation_prompt %} GO{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hello world"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
Check = Callable[[Harness, Answer], object]


# ---- what shows that a field was honoured ----


def record(name: str, value: Any) -> Check:
    return lambda harness, _: harness.engine.all_requests[-1].record[name] == pytest.approx(value)


def extension(*kinds: ExtensionKind) -> Check:
    return lambda harness, _: any(int(kind) in harness.engine.all_requests[-1].extensions for kind in kinds)


def prompt_text(harness: Harness) -> str:
    return str(tiny_tokenizer().decode(harness.engine.all_requests[-1].prompt, skip_special_tokens=False))


def prompt_has(text: str) -> Check:
    return lambda harness, _: text in prompt_text(harness)


def prompt_lacks(text: str) -> Check:
    return lambda harness, _: text not in prompt_text(harness)


def answer_has(text: str) -> Check:
    return lambda _, answer: text in answer.body.decode()


def answer_lacks(text: str) -> Check:
    return lambda _, answer: text not in answer.body.decode()


def num_choices(count: int) -> Check:
    return lambda _, answer: len(answer.json["choices"]) == count


def num_prompt_tokens(count: int) -> Check:
    return lambda harness, _: len(harness.engine.all_requests[-1].prompt) == count


def prompt_ends(token_id: int) -> Check:
    return lambda harness, _: harness.engine.all_requests[-1].prompt[-1] == token_id


def stops_at(token_id: int) -> Check:
    return lambda harness, _: token_id in harness.engine.all_requests[-1].stop_ids


JSON_KINDS = (ExtensionKind.GRAMMAR_JSON_SCHEMA, ExtensionKind.GRAMMAR_JSON_OBJECT)
# Field -> (further fields with it, what shows it). On every route that generates.
HONOURED: dict[str, tuple[dict[str, Any], Check]] = {
    "model": ({"model": MODEL}, answer_has('"model":"tiny"')),
    "temperature": ({"temperature": 0.5}, record("temperature", 0.5)),
    "top_p": ({"top_p": 0.5}, record("top_p", 0.5)),
    "top_k": ({"top_k": 5}, record("top_k", 5)),
    "min_p": ({"min_p": 0.25}, record("min_p", 0.25)),
    "repetition_penalty": ({"repetition_penalty": 1.5}, record("repetition_penalty", 1.5)),
    "presence_penalty": ({"presence_penalty": 0.5}, record("presence_penalty", 0.5)),
    "frequency_penalty": ({"frequency_penalty": 0.5}, record("frequency_penalty", 0.5)),
    "seed": ({"seed": 1234}, record("seed", 1234)),
    "max_tokens": ({"max_tokens": 3}, record("max_tokens", 3)),
    "min_tokens": ({"min_tokens": 2}, record("min_tokens", 2)),
    "n": ({"n": 2}, num_choices(2)),
    "stop": ({"stop": ["cat"], "max_tokens": 9}, answer_has('"stop_reason":"cat"')),
    "stop_token_ids": ({"stop_token_ids": [99]}, stops_at(99)),
    "ignore_eos": ({"ignore_eos": True}, record("eos_mask", 0)),
    "logit_bias": ({"logit_bias": {"5": 1}}, extension(ExtensionKind.LOGIT_BIAS)),
    "allowed_token_ids": ({"allowed_token_ids": [5, 6]}, extension(ExtensionKind.ALLOWED_IDS)),
    "bad_words": ({"bad_words": ["dog"]}, extension(ExtensionKind.BAD_WORDS)),
    "cache_salt": ({"cache_salt": "s"}, extension(ExtensionKind.CACHE_SALT)),
    "priority": ({"priority": -3}, record("priority", -3)),
    "prompt_logprobs": ({"prompt_logprobs": 1}, answer_has('"prompt_logprobs":[null,')),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 2}, num_prompt_tokens(2)),
    "response_format": ({"response_format": {"type": "json_object"}}, extension(*JSON_KINDS)),
    "structured_outputs": ({"structured_outputs": {"regex": "a+"}}, extension(ExtensionKind.GRAMMAR_REGEX)),
    "guided_json": ({"guided_json": SCHEMA}, extension(ExtensionKind.GRAMMAR_JSON_SCHEMA)),
    "guided_regex": ({"guided_regex": "a+"}, extension(ExtensionKind.GRAMMAR_REGEX)),
    "guided_choice": ({"guided_choice": ["a", "b"]}, extension(ExtensionKind.GRAMMAR_CHOICE)),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, extension(ExtensionKind.GRAMMAR_EBNF)),
}
HONOURED_IN_TEXT: dict[str, tuple[dict[str, Any], Check]] = {
    "stream": ({"stream": True}, answer_has("data: [DONE]")),
    "stream_options": ({"stream": True, "stream_options": {"include_usage": True}}, answer_has('"usage":{')),
    "stream_interval": (
        {"stream": True, "stream_interval": 3, "max_tokens": 7, "return_token_ids": True},
        lambda _, answer: [1, 3, 3] == [len(ids) for ids in token_ids_of(answer) if ids],
    ),
    "include_stop_str_in_output": (
        {"include_stop_str_in_output": True, "stop": "cat", "max_tokens": 9},
        lambda _, answer: answer.text.endswith("cat"),
    ),
    "skip_special_tokens": (
        {"skip_special_tokens": False, "max_tokens": len(STORY)},
        answer_has("<|im_start|>"),
    ),
    "return_tokens_as_token_ids": ({"return_tokens_as_token_ids": True, "logprobs": 1}, answer_has('"token_id:')),
    "return_token_ids": ({"return_token_ids": True}, answer_has('"token_ids":[')),
    "request_id": ({"request_id": "mine"}, answer_has('-mine"')),
    "timeout": ({"timeout": 30}, lambda harness, _: harness.engine.all_requests[-1].record["deadline_ns"] > 0),
    "logprob_token_ids": ({"logprob_token_ids": [7], "logprobs": 1}, extension(ExtensionKind.LOGPROB_IDS)),
    "truncation_side": ({"truncate_prompt_tokens": 1, "truncation_side": "right"}, num_prompt_tokens(1)),
}
HONOURED_IN_COMPLETIONS: dict[str, tuple[dict[str, Any], Check]] = {
    "prompt": ({"prompt": [5, 6, 7]}, num_prompt_tokens(3)),
    "echo": ({"echo": True}, lambda _, answer: answer.text.startswith("hello world")),
    "logprobs": ({"logprobs": 2}, record("num_logprobs", 2)),
    "best_of": ({"best_of": 2}, lambda harness, _: len(harness.engine.all_requests) == 2),
    "truncation_side": (
        {"prompt": [5, 6, 7], "truncate_prompt_tokens": 2, "truncation_side": "right"},
        prompt_ends(6),
    ),
    "add_special_tokens": ({"add_special_tokens": False}, lambda harness, _: harness.added_special == [False]),
}
HONOURED_IN_CHATS: dict[str, tuple[dict[str, Any], Check]] = {
    "messages": ({"messages": [{"role": "user", "content": "the man"}]}, prompt_has("the man")),
    "max_completion_tokens": ({"max_completion_tokens": 3, "max_tokens": 9}, record("max_tokens", 3)),
    "logprobs": ({"logprobs": True}, record("num_logprobs", 0)),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, record("num_logprobs", 2)),
    "tools": ({"tools": [TOOL]}, prompt_has("'name': 'f'")),
    "tool_choice": ({"tools": [TOOL], "tool_choice": "required"}, extension(ExtensionKind.GRAMMAR_JSON_SCHEMA)),
    "parallel_tool_calls": (
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        lambda harness, _: b'"maxItems":1' in b"".join(harness.engine.all_requests[-1].extensions.values()),
    ),
    "add_generation_prompt": ({"add_generation_prompt": False}, prompt_lacks("GO")),
    "continue_final_message": ({"continue_final_message": True}, prompt_lacks("<|im_end|>")),
    "documents": ({"documents": [{"title": "t", "text": "the dog"}]}, prompt_has("the dog")),
    "chat_template_kwargs": ({"chat_template_kwargs": {"colour": "red"}}, prompt_has("red")),
    "reasoning_effort": ({"reasoning_effort": "high"}, prompt_has("high")),
}
# Field -> a value that asks for what is not done.
REFUSED: dict[str, Any] = {
    "use_beam_search": True,
    "length_penalty": 2.0,
    "logits_processors": ["x"],
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "repetition_detection": {"max_pattern_size": 3},
    "thinking_token_budget": 10,
    "watermarking": True,
    "routed_experts_prompt_start": 1,
    "return_token_offsets": True,
    "return_prompt_text": True,
    "guided_decoding_backend": "outlines",
    "guided_whitespace_pattern": " ",
}
REFUSED_IN_COMPLETIONS: dict[str, Any] = {"suffix": "x", "prompt_embeds": "x"}
REFUSED_IN_CHATS: dict[str, Any] = {
    "best_of": 2,
    "echo": True,
    "add_special_tokens": True,
    "chat_template": "{{ 1 }}",
    "include_reasoning": False,
    "media_io_kwargs": {"a": 1},
    "audio": {"voice": "x"},
    "modalities": ["audio"],
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "store": True,
    "service_tier": "flex",
    "verbosity": "high",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "moderation": {"model": "m"},
}
REFUSED_IN_GENERATE: dict[str, Any] = {
    "best_of": 2,
    "output_kind": 0,
    "flat_logprobs": True,
    "prompt_logprob_token_ids": [5],
    "prompt_logprob_start": 1,
    "skip_reading_prefix_cache": True,
    "trace_decode_token_ids": [5],
    "extra_args": {"a": 1},
}
# Hints, and what happens anyway: taken and without effect.
HINTS: dict[str, Any] = {
    "user": "u",
    "session_id": "s",
    "spaces_between_special_tokens": False,
    "return_mm_kwargs": False,
}
CHAT_HINTS: dict[str, Any] = {"safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}}
GENERATE_HINTS: dict[str, Any] = {"detokenize": False}

# The documented fields of vLLM's request classes, beside those that the openai package knows.
VLLM_COMMON = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words add_special_tokens response_format structured_outputs
    priority request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
    return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection thinking_token_budget stream_interval
""".split()
VLLM_COMPLETIONS = ["prompt_embeds"]
VLLM_CHATS = """
    include_reasoning echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text
""".split()
VLLM_SAMPLING_PARAMS = """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
    ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
    logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output output_kind stream_interval structured_outputs logit_bias allowed_token_ids extra_args
    bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
    trace_decode_token_ids
""".split()
COMPLETION_FIELDS = {
    **dict.fromkeys([*HONOURED, *HONOURED_IN_TEXT, *HONOURED_IN_COMPLETIONS]),
    **dict.fromkeys([*REFUSED, *REFUSED_IN_COMPLETIONS, *HINTS]),
}
CHAT_FIELDS = {
    **dict.fromkeys([*HONOURED, *HONOURED_IN_TEXT, *HONOURED_IN_CHATS]),
    **dict.fromkeys([*REFUSED, *REFUSED_IN_CHATS, *HINTS, *CHAT_HINTS]),
}


def token_ids_of(answer: Answer) -> list[list[int]]:
    return [choice.get("token_ids") or [] for chunk in answer.chunks for choice in chunk["choices"]]


def fields_of(struct: type) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(struct)}


@pytest.mark.parametrize(
    ("struct", "table"), [(CompletionRequest, COMPLETION_FIELDS), (ChatCompletionRequest, CHAT_FIELDS)]
)
def test_the_tables_here_hold_every_field_that_the_server_knows(struct: type, table: dict[str, None]) -> None:
    assert fields_of(struct) == set(table)


@pytest.mark.parametrize(
    ("documented", "known"),
    [
        (openai_types.completion_create_params.CompletionCreateParamsBase.__annotations__, COMPLETION_FIELDS),
        (openai_chat_types.completion_create_params.CompletionCreateParamsBase.__annotations__, CHAT_FIELDS),
        (VLLM_COMMON, COMPLETION_FIELDS),
        (VLLM_COMMON, CHAT_FIELDS),
        (VLLM_COMPLETIONS, COMPLETION_FIELDS),
        (VLLM_CHATS, CHAT_FIELDS),
        (VLLM_SAMPLING_PARAMS, dict.fromkeys(fields_of(SamplingFields))),
    ],
)
def test_every_documented_field_is_known(documented: Any, known: dict[str, None]) -> None:
    assert set(documented) <= set(known), set(documented) - set(known)


async def ask(harness: Harness, path: str, **fields: Any) -> Answer:
    """A request of `path` with these fields; those of a generate request go into its sampling_params."""
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
    if path == GENERATE:
        body = {"model": MODEL, "token_ids": [5, 6, 7], "sampling_params": {**defaults, **fields}}
    elif path == COMPLETION:
        body = {"model": MODEL, "prompt": "hello world", **defaults, **fields}
    else:
        body = {"model": MODEL, "messages": MESSAGES, **defaults, **fields}
    return await harness.post(path, body)


@pytest.mark.parametrize(
    ("path", "table"),
    [
        (COMPLETION, {**HONOURED, **HONOURED_IN_TEXT, **HONOURED_IN_COMPLETIONS}),
        (CHAT, {**HONOURED, **HONOURED_IN_TEXT, **HONOURED_IN_CHATS}),
        (GENERATE, {**HONOURED, "logprobs": ({"logprobs": 2}, record("num_logprobs", 2))}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@served(lambda request: [*tell_story(request), *ids_of("<|im_start|>")], scheduling_policy="priority")
async def test_a_field_is_honoured(harness: Harness, path: str, table: dict[str, tuple[dict[str, Any], Check]]) -> None:
    encoder = harness.front_end.model.encoder
    encoder.chat_template = ChatTemplate(TEMPLATE, {})
    encode, harness.added_special = encoder._encode_texts, []  # type: ignore[attr-defined]

    def encode_texts(texts: Any, add_special_tokens: bool) -> Any:
        harness.added_special.append(add_special_tokens)  # type: ignore[attr-defined]
        return encode(texts, add_special_tokens)

    encoder._encode_texts = encode_texts  # type: ignore[method-assign]
    for name, (fields, shows) in table.items():
        harness.engine.all_requests.clear()
        harness.added_special.clear()  # type: ignore[attr-defined]
        if path == CHAT and "logprobs" in fields:
            fields = {**fields, "logprobs": True}
        answer = await ask(harness, path, **fields)
        assert answer.status == 200, (name, answer.body)
        assert shows(harness, answer), (name, answer.body, prompt_text(harness))


@pytest.mark.parametrize(
    ("path", "table"),
    [
        (COMPLETION, {**REFUSED, **REFUSED_IN_COMPLETIONS}),
        (CHAT, {**REFUSED, **REFUSED_IN_CHATS}),
        (RENDER, {**REFUSED, **REFUSED_IN_CHATS}),
        (GENERATE, {**REFUSED, **REFUSED_IN_GENERATE}),
        (TOKENIZE, {"chat_template": "x", "add_special_tokens": True, "media_io_kwargs": {"a": 1}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@served()
async def test_a_field_is_refused_by_name(harness: Harness, path: str, table: dict[str, Any]) -> None:
    for name, value in table.items():
        answer = await ask(harness, path, **{name: value})
        assert (answer.status, answer.error["param"]) == (400, name), answer.body
        assert answer.error["code"] == "unsupported_parameter", answer.body
    assert harness.engine.all_requests == []


@pytest.mark.parametrize("path", [COMPLETION, CHAT, GENERATE])
@served()
async def test_hints_are_taken_and_documented_as_such(harness: Harness, path: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    [paragraph] = re.findall(r"\*\*Accepted without effect\*\*.*?\n(?=- |\n)", text, re.DOTALL)
    for name, value in {**HINTS, **{CHAT: CHAT_HINTS, GENERATE: GENERATE_HINTS}.get(path, {})}.items():
        answer = await ask(harness, path, **{name: value})
        assert answer.status == 200, (name, answer.body)
        assert f"`{name}`" in paragraph, name


@served()
async def test_obfuscated_streams_and_deferred_tools_are_refused(harness: Harness) -> None:
    for options in ({"include_obfuscation": True}, {"include_usage": True, "include_obfuscation": True}):
        answer = await harness.chat(stream=True, stream_options=options)
        assert (answer.status, answer.error["param"]) == (400, "stream_options")
    assert (await harness.chat(stream=True, stream_options={"include_obfuscation": False}, max_tokens=1)).status == 200
    for tool in ({**TOOL, "defer_loading": True}, {**TOOL, "function": {"name": "f", "defer_loading": True}}):
        answer = await harness.chat(tools=[tool])
        assert (answer.status, answer.error["param"]) == (400, "tools")


@served(scheduling_policy="priority")
async def test_fields_of_the_other_routes(harness: Harness) -> None:
    assert fields_of(DetokenizeRequest) == {"model", "tokens"}
    assert fields_of(GenerateRequest) == {
        *("token_ids", "sampling_params", "model", "stream", "stream_options", "request_id", "cache_salt", "priority"),
        *("features", "kv_transfer_params"),
    }
    for name in ("features", "kv_transfer_params"):
        answer = await harness.post(GENERATE, {"token_ids": [5], name: {"a": 1}})
        assert (answer.status, answer.error["param"]) == (400, name)
    body = {"token_ids": [5], "request_id": "r", "cache_salt": "s", "priority": 4, "sampling_params": {"max_tokens": 1}}
    assert (await harness.post(GENERATE, body)).json["request_id"] == "r"
    assert record("priority", 4)(harness, None) and extension(ExtensionKind.CACHE_SALT)(harness, None)  # type: ignore[arg-type]
    chats = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
    refused = {"chat_template", "media_io_kwargs", "mm_processor_kwargs"}
    assert fields_of(TokenizeRequest) == chats | refused | {
        "model",
        "prompt",
        "add_special_tokens",
        "return_token_strs",
    }
    plain = (await harness.post(TOKENIZE, {"messages": MESSAGES})).json["count"]
    shorter = (await harness.post(TOKENIZE, {"messages": MESSAGES, "add_generation_prompt": False})).json["count"]
    longer = (await harness.post(TOKENIZE, {"messages": MESSAGES, "tools": [TOOL]})).json["count"]
    assert shorter < plain < longer


@served()
async def test_wrong_values_of_every_route_are_a_400_that_names_the_field(harness: Harness) -> None:
    """What checks raise on one route is an answer on all of them."""
    faults: dict[str, Any] = {
        "structured_outputs": {},
        "stream_interval": 0,
        "logprob_token_ids": [7],
        "truncation_side": "middle",
    }
    for path in (COMPLETION, CHAT, RENDER, GENERATE):
        for name, value in faults.items():
            answer = await ask(harness, path, **{name: value})
            assert answer.status == 400 and answer.error["param"] in (name, "sampling_params"), (path, answer.body)
    answer = await harness.post(TOKENIZE, {"messages": MESSAGES, "tools": [TOOL, TOOL]})
    assert (answer.status, answer.error["param"]) == (400, "tools")
