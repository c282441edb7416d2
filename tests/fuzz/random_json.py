"""Random request bodies: a good one of each route, with fields taken away, put in and bent."""

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

from tokring.server.api_types import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tokring.server.generate import GenerateRequest, SamplingFields

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
COMPLETION: dict[str, Any] = {"prompt": "hello", "max_tokens": 3}
# Route -> (a good body, the fields that it knows).
ROUTES: dict[str, tuple[dict[str, Any], type]] = {
    "/v1/chat/completions": (CHAT, ChatCompletionRequest),
    "/v1/completions": (COMPLETION, CompletionRequest),
    "/v1/chat/completions/render": (CHAT, ChatCompletionRequest),
    "/inference/v1/generate": ({"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}, GenerateRequest),
    "/invocations": (COMPLETION, CompletionRequest),
    "/tokenize": ({"prompt": "hello"}, TokenizeRequest),
    "/detokenize": ({"tokens": [5, 6, 7]}, DetokenizeRequest),
}
NUMBERS: list[Any] = [0, 1, -1, 2, 7, 20, 21, 128, 129, 1.5, -0.0, 0.1, 1e-300, 1e308, float("nan"), float("inf")]
NUMBERS += [2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**40]
TEXTS = [
    "",
    "a",
    "hello",
    " ",
    "\0",
    "\n",
    '"',
    "\\",
    "é",
    "😀",
    "\ud83d",
    "\udc00",
    "\ufffd",
    "\u2028",
    "none",
    "auto",
]
TEXTS += [
    "required",
    "text",
    "json_object",
    "left",
    "right",
    "<|im_start|>",
    "<tool_call>",
    "{{ 1 }}",
    "a" * 5_000,
    "[" * 300,
]
REGEXES = ["a+", "(a|b){1,3}", "[", "(?=a)", "(a*)*b", "\\", "x{1,99999}", "[^a]", ".*", "(?P<n>a)(?P=n)", "\\d{4}", ""]
GRAMMARS = ['root ::= "a"', "root ::= root", 'start: "a"+', "%", 'start: x\nx: "b" | x', "", "\0"]
SCHEMAS: list[Any] = [
    *({}, True, {"type": "object"}, {"type": "string", "pattern": "("}, {"$ref": "#"}, {"$ref": "#/$defs/a"}),
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"anyOf": [{"const": 1}, {"enum": ["x", None]}]},
    {"allOf": [{"type": "string"}, {"minLength": 2, "maxLength": 3}]},
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
    *({"type": "string", "maxLength": 10**12}, {"type": "integer", "minimum": 5, "maximum": 4}, {"not": {}}),
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
Draw = random.Random


def _schema(draw: Draw) -> Any:
    return draw.choice(SCHEMAS)


def _tools(draw: Draw) -> Any:
    function = {"name": draw.choice(["f", "g.h", "", "ü", 5]), "parameters": _schema(draw)}
    return [TOOL, *([{"type": "function", "function": function}] if draw.random() < 0.5 else [])]


def _ids(draw: Draw) -> Any:
    return [draw.choice([0, 1, 5, 255, 300, 10**6, -1, 2**40]) for _ in range(draw.randrange(4))]


def _messages(draw: Draw) -> Any:
    call = {"id": "x", "function": {"name": "f", "arguments": draw.choice(["{}", "{", "[]", '{"a": 1}', {"a": 1}])}}
    parts = [{"type": draw.choice(["text", "image_url", "refusal", 5]), "text": draw.choice(TEXTS)}, "a"]
    kinds: list[Any] = [
        {"role": draw.choice(["user", "system", "developer", "banana", 5]), "content": draw.choice(TEXTS)},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": draw.choice(["x", 5]), "content": draw.choice(TEXTS)},
        {"role": "user", "content": parts},
        draw.choice([None, 5, [], {}]),
    ]
    return [*CHAT["messages"], *draw.sample(kinds, draw.randrange(1, 4))]


def _structured(draw: Draw) -> Any:
    value = {"json": _schema(draw), "regex": draw.choice(REGEXES), "grammar": draw.choice(GRAMMARS)}
    value |= {"choice": draw.choice([[], ["a"], ["a", ""], [5]]), "json_object": True, "structural_tag": "{}"}
    names = draw.sample(sorted(value), draw.choice([1, 1, 1, 2]))
    return {name: value[name] for name in names}


# Fields of which a random value would hardly ever be taken.
LIKELY: dict[str, Callable[[Draw], Any]] = {
    "messages": _messages,
    "tools": _tools,
    "tool_choice": lambda draw: draw.choice(["auto", "none", "required", TOOL, {"type": "function"}]),
    "response_format": lambda draw: {
        "type": draw.choice(["text", "json_object", "json_schema", "x"]),
        "json_schema": {"name": "s", "schema": _schema(draw)},
    },
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": lambda draw: draw.choice(REGEXES),
    "guided_grammar": lambda draw: draw.choice(GRAMMARS),
    "guided_choice": lambda draw: draw.choice([["a", "b"], [], ["é" * 300], [None]]),
    "stop": lambda draw: draw.sample(TEXTS, draw.randrange(4)),
    "logit_bias": lambda draw: {str(key): draw.choice([1, -100, 101, "x"]) for key in _ids(draw)},
    "prompt": lambda draw: draw.choice(
        [_ids(draw), [_ids(draw), _ids(draw)], draw.choice(TEXTS), [draw.choice(TEXTS)]]
    ),
    "token_ids": _ids,
    "tokens": _ids,
    "stop_token_ids": _ids,
    "allowed_token_ids": _ids,
    "logprob_token_ids": _ids,
    "bad_words": lambda draw: draw.sample(TEXTS, 2),
    "logprobs": lambda draw: draw.choice([True, 0, 3, 20]),
    "top_logprobs": lambda draw: draw.choice([0, 3, 20]),
    "prompt_logprobs": lambda draw: draw.choice([0, 3, 20]),
    "n": lambda draw: draw.choice([1, 2, 3]),
    "best_of": lambda draw: draw.choice([1, 2, 3]),
    "max_tokens": lambda draw: draw.choice([0, 1, 5, 40]),
    "stream": lambda draw: True,
    "stream_options": lambda draw: {"include_usage": True, "continuous_usage_stats": draw.random() < 0.5},
    "chat_template_kwargs": lambda draw: {draw.choice(["a", "messages", "__class__", ""]): random_value(draw)},
    "documents": lambda draw: [{"title": "a", "text": draw.choice(TEXTS)}],
    "timeout": lambda draw: draw.choice([0, 0.001, 60, -1]),
    "temperature": lambda draw: draw.choice([0, 0.5, 1.0, 100]),
}


def random_value(draw: Draw, depth: int = 0) -> Any:
    """Any JSON value, and some that JSON does not know."""
    kind = draw.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind < 4:
        return draw.choice(TEXTS)
    if kind == 4:
        return draw.choice([None, True, False])
    if kind == 5:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {draw.choice(TEXTS[:12]): random_value(draw, depth + 1) for _ in range(draw.randrange(4))}
    return _nested(draw.choice([5, 40, 200, 2_000]), draw.random() < 0.5)


def _nested(depth: int, as_lists: bool) -> Any:
    value: Any = 1
    for _ in range(min(depth, 900)):  # json.dumps recurses
        value = [value] if as_lists else {"a": value}
    return value


def random_body(draw: Draw, route: str) -> bytes:
    """A body for the route: mostly good JSON with some fields changed, sometimes no JSON at all."""
    good, struct = ROUTES[route]
    body = json.loads(json.dumps(good))
    names = [field.encode_name for field in msgspec.structs.fields(struct)]
    _bend(draw, body, names)
    if "sampling_params" in body and isinstance(body["sampling_params"], dict):
        _bend(draw, body["sampling_params"], [field.encode_name for field in msgspec.structs.fields(SamplingFields)])
    data = json.dumps(body, ensure_ascii=True).encode()
    return damaged(draw, data) if draw.random() < 0.1 else data


def _bend(draw: Draw, body: dict[str, Any], names: list[str]) -> None:
    for _ in range(draw.choice([0, 1, 1, 2, 3, 6])):
        name = draw.choice(names)
        likely = LIKELY.get(name)
        body[name] = likely(draw) if likely is not None and draw.random() < 0.8 else random_value(draw)
    if draw.random() < 0.05 and body:
        body.pop(draw.choice(sorted(body)))
    if draw.random() < 0.05:
        body[draw.choice(TEXTS)] = random_value(draw)


def damaged(draw: Draw, data: bytes) -> bytes:
    """Bytes flipped, cut out, doubled or put in."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at : at + draw.randrange(1, 20)]
        elif kind == 2:
            changed[at:at] = bytes(draw.choices(b'\0\r\n\t "\\{}[],:\xff\xc3\x80;0aZ', k=draw.randrange(1, 6)))
        elif kind == 3:
            changed[at:at] = changed[max(0, at - draw.randrange(1, 40)) : at]
        else:
            del changed[at:]
    return bytes(changed)
