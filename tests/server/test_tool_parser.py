"""Tool parsers: however the text is cut, the deltas add up to the same calls, and to those of the whole text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokring.server.tool_parser import HermesParser, NamedCallParser, RequiredCallsParser, ToolParser, join_deltas


def calls_of(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    content, calls = join_deltas(deltas)
    assert len({call["id"] for call in calls}) == len(calls)
    return content, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def cut(text: str, positions: list[int]) -> list[str]:
    ends = sorted(position % (len(text) + 1) for position in positions)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "R\\"o}me", "list": [1, {"a": "]"}]}}\n</tool_call>'
ARGUMENTS = '{"city": "R\\"o}me", "list": [1, {"a": "]"}]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text <b> </b>", "just text <b> </b>", []),
        (CALL, "", [("get", ARGUMENTS)]),
        ("I look.\n" + CALL, "I look.", [("get", ARGUMENTS)]),
        (CALL + "\n" + CALL, "", [("get", ARGUMENTS), ("get", ARGUMENTS)]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}</tool_call>', "", [("f", "{}"), ("g", "{}")]),
        ('<tool_call>{"name": "f"}\nNo tag.', "\nNo tag.", [("f", "{}")]),
        ('<tool_call>{"name": "f"}\n</tool', "", [("f", "{}")]),
        ('<tool_call>\n{"city": "Rome"}\n</tool_call>', '<tool_call>\n{"city": "Rome"}\n</tool_call>', []),
        ("<tool_call>}</tool_call> x", "<tool_call>}</tool_call> x", []),
        ("<tool_call>nonsense", "<tool_call>nonsense", []),
        ("a <tool_ca", "a <tool_ca", []),
        ("trailing space  ", "trailing space  ", []),
    ],
)
@given(positions=st.lists(st.integers(0, 400), max_size=12))
def test_hermes_text_cut_anywhere(text: str, content: str, calls: list[tuple[str, str]], positions: list[int]) -> None:
    assert calls_of(HermesParser(), cut(text, positions)) == (content, calls)


def test_hermes_lets_arguments_through_before_the_call_is_complete() -> None:
    parser = HermesParser()
    deltas = parser.feed('<tool_call>{"name": "f", "arguments": {"a": ')
    assert join_deltas(deltas)[1][0]["function"] == {"name": "f", "arguments": '{"a": '}


def test_hermes_keeps_the_first_call_only_if_several_are_not_wanted() -> None:
    _, calls = calls_of(HermesParser(allows_several=False), [CALL + CALL])
    assert len(calls) == 1


@given(positions=st.lists(st.integers(0, 400), max_size=12))
def test_required_calls_cut_anywhere(positions: list[int]) -> None:
    text = json.dumps([{"name": "f", "parameters": {"a": "]}"}}, {"name": "g", "parameters": {}}])
    assert calls_of(RequiredCallsParser(), cut(text, positions)) == ("", [("f", '{"a": "]}"}'), ("g", "{}")])


def test_a_named_call_is_all_arguments() -> None:
    assert calls_of(NamedCallParser("f"), ['{"a"', ": 1}"]) == ("", [("f", '{"a": 1}')])


def test_a_named_call_without_text_is_still_a_call() -> None:
    assert calls_of(NamedCallParser("f"), []) == ("", [("f", "")])
