"""docs/api.md's tables say what the code does."""

import re
from pathlib import Path

import pytest

from tokring import sampling_params
from tokring.config import ServerSettings
from tokring.server import (
    chat_completions,
    completions,
    conversation,
    json_schema,
    json_text,
    structured_output,
    tokenize,
    tools,
)
from tokring.server.unsupported_fields import _FIELDS

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
ROWS = {row.split("|")[1].strip(): row.split("|")[2] for row in TEXT.splitlines() if row.startswith("| ")}


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ("`n`, `best_of`", [sampling_params.MAX_CHOICES]),
        ("prompts in one request", [completions.MAX_PROMPTS]),
        ("messages in one request", [conversation.MAX_MESSAGES]),
        ("`chat_template_kwargs`", [conversation.MAX_TEMPLATE_KWARGS_BYTES]),
        ("`prompt` of `/tokenize`", [tokenize.MAX_CHARS]),
        ("`stop`", [sampling_params.MAX_STOP_STRINGS, sampling_params.MAX_STOP_STRING_CHARS]),
        ("`stop_token_ids`", [sampling_params.MAX_STOP_TOKEN_IDS]),
        ("`logit_bias`", [sampling_params.MAX_LOGIT_BIAS]),
        ("`bad_words`", [sampling_params.MAX_BAD_WORDS, sampling_params.MAX_BAD_WORD_IDS]),
        ("`logprob_token_ids`", [sampling_params.MAX_LOGPROB_TOKEN_IDS]),
        ("`logprobs`, `top_logprobs`, `prompt_logprobs`", [sampling_params.MAX_LOGPROBS]),
        ("`temperature`", [int(sampling_params.MAX_TEMPERATURE)]),
        ("`repetition_penalty`", [int(sampling_params.MAX_REPETITION_PENALTY)]),
        ("`max_tokens`", [completions.DEFAULT_MAX_TOKENS]),
        ("tools", [tools.MAX_TOOLS]),
        (
            "JSON schemas",
            [
                json_schema.MAX_DEPTH,
                json_schema.MAX_NODES,
                json_schema.MAX_ENUM_VALUES,
                json_schema.MAX_PATTERN_CHARS,
                json_schema.MAX_REPEAT,
            ],
        ),
        (
            "constraint text",
            [
                sampling_params.MAX_STRUCTURED_OUTPUT_CHARS,
                structured_output.MAX_REGEX_CHARS,
                structured_output.MAX_CHOICES,
            ],
        ),
        ("`metadata`", [chat_completions.MAX_METADATA_ENTRIES]),
        (
            "body",
            [
                ServerSettings().max_body_bytes >> 20,
                int(ServerSettings().request_timeout),
                json_text.MAX_NESTING,
                json_text.MAX_CONTAINERS,
            ],
        ),
        ("body", [json_text.MAX_STRINGS, json_text.MAX_VALUES]),
    ],
)
def test_a_bound_is_documented_as_it_is(row: str, values: list[int]) -> None:
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", ROWS[row])]
    assert set(values) <= set(numbers), (row, ROWS[row])


def test_every_refused_field_is_documented() -> None:
    missing = [field for field in _FIELDS if f"`{field}`" not in TEXT]
    assert missing == []
