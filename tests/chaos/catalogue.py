"""What is asked: every kind of request, with an answer that does not depend on when or beside whom it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NUM_VARIANTS = 3
WORDS = {"regex": "([a-z]{2,9}[ ,;.])+"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Asked:
    name: str
    route: str
    body: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


def catalogue(num_tokens: int) -> list[Asked]:
    """Greedy and seeded, streamed and whole, n > 1, logprobs, penalties, grammars, shared and long prompts."""
    return [
        Asked(f"{name} {variant}", route, {**body, **_common(name, num_tokens + 7 * variant)})
        for variant in range(NUM_VARIANTS)
        for name, route, body in _kinds(variant)
    ]


def _common(name: str, num_tokens: int) -> dict[str, Any]:
    """Streams end with usage; all but grammars, which know their end, have a fixed length."""
    is_stream = "streamed" in name
    common: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": "schema" not in name, "stream": is_stream}
    return common | ({"stream_options": {"include_usage": True}} if is_stream else {})


def _kinds(variant: int) -> list[tuple[str, str, dict[str, Any]]]:
    prompt = list(range(100 + variant, 140 + variant))
    shared = list(range(50, 250))
    messages = [{"role": "user", "content": f"Where is the harbour, and who counted the ships {variant} times?"}]
    seeded = {"temperature": 0.9, "seed": 10 + variant}
    return [
        ("greedy, streamed", "completions", {"prompt": prompt, "temperature": 0}),
        ("greedy, whole", "completions", {"prompt": [7 + variant, 9], "temperature": 0}),
        ("seeded, n=2, streamed", "completions", {"prompt": prompt, "n": 2, **seeded}),
        ("seeded, n=3, whole", "completions", {"prompt": "The lamp", "n": 3, **seeded}),
        ("frequency penalty, whole", "completions", {"prompt": "Hello", "frequency_penalty": 0.7, **seeded}),
        ("presence penalty, streamed", "completions", {"prompt": "The", "presence_penalty": 0.5, **seeded}),
        (
            "repetition penalty, streamed",
            "chat/completions",
            {"messages": messages, "repetition_penalty": 1.1, **seeded},
        ),
        ("logprobs, streamed", "completions", {"prompt": [5, 6, variant + 7], "temperature": 0, "logprobs": 2}),
        ("logprobs, n=2, whole", "chat/completions", {"messages": messages, "n": 2, "logprobs": True, **seeded}),
        ("regex, streamed", "completions", {"prompt": [7, 8 + variant], "structured_outputs": WORDS, **seeded}),
        ("schema, whole", "chat/completions", {"messages": messages, "response_format": _json(), **seeded}),
        ("chat, top_p, streamed", "chat/completions", {"messages": messages, "top_p": 0.9, **seeded}),
        ("long shared prompt, streamed", "completions", {"prompt": [*shared, variant + 3], "temperature": 0}),
        ("min_tokens and top_k, whole", "completions", {"prompt": "a b", "min_tokens": 20, "top_k": 40, **seeded}),
    ]


def _json() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "ship", "schema": SCHEMA}}


def with_stop_string(asked: Asked, text: str) -> Asked | None:
    """The same, to be ended by a string of its own text: four plain characters from the middle on, if there are."""
    for start in range(len(text) // 2, len(text) - 4):
        piece = text[start : start + 4]
        if piece.isascii() and piece.isprintable() and text.find(piece) > len(text) // 4:
            return Asked(f"{asked.name}, stop string", asked.route, {**asked.body, "stop": [piece]})
    return None
