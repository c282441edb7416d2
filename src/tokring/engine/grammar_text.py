"""llguidance_grammar: a request's output constraint in the language of llguidance."""

from __future__ import annotations

import json
from typing import Any

from tokring_ipc import ExtensionKind

MAX_GRAMMAR_BYTES = 256 << 10
# Whitespace between JSON tokens is free, but not endless: small models like to fall into it and never come back.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"


class GrammarError(ValueError):
    """A constraint that can't be served; the message says why."""


class GrammarUnavailableError(Exception):
    """A constraint that could not be looked at now: not its fault, it may be asked for again."""


def llguidance_grammar(kind: ExtensionKind, text: str) -> str:
    """Translate the text of a GRAMMAR_* extension. Raises GrammarError; whether it compiles is seen later.

    Runs in a vetting job: llguidance's translator of EBNF is Python and as slow as its input wants it to be.
    """
    try:
        return _TRANSLATORS[kind](text)
    except (ValueError, AssertionError, KeyError, TypeError, RecursionError) as error:
        raise GrammarError(str(error)) from error


def _json_schema(text: str) -> str:
    from llguidance import LLMatcher

    # coerce_one_of: oneOf is enforced as anyOf where its alternatives can't be told apart by a grammar.
    return LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_pattern": _WHITESPACE, "coerce_one_of": True, "lenient": False}
    )


def _json_object(_: str) -> str:
    return _json_schema('{"type": "object"}')


def _regex(text: str) -> str:
    from llguidance import LLMatcher

    # The whole output has to match: anchors say nothing new, and llguidance does not know them.
    text = text.removeprefix("^")
    if text.endswith("$") and not _ends_in_escape(text[:-1]):
        text = text[:-1]
    if _ends_in_escape(text):  # llguidance would drop it
        raise ValueError("the regular expression ends in a backslash that escapes nothing")
    return LLMatcher.grammar_from_regex(text)


def _ends_in_escape(text: str) -> bool:
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _choice(text: str) -> str:
    from llguidance import LLMatcher

    choices = json.loads(text)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("not a list of non-empty strings")
    literals = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(literals))


def _ebnf(text: str) -> str:
    import llguidance

    return llguidance.grammar_from("grammar", text)


def _structural_tag(text: str) -> str:
    from llguidance import StructTag

    try:
        tags = _tags_of(json.loads(text))
    except KeyError as error:
        raise ValueError(f"a structural tag lacks {error}") from None
    except (AttributeError, TypeError) as error:
        raise ValueError(f"a structural tag is malformed: {error}") from None
    return StructTag.to_grammar(tags, assume_special=False)


def _tags_of(value: Any) -> list[Any]:
    """The tags of {"structures", "triggers"}, or of {"format": {"type": "triggered_tags", "tags", "triggers"}}."""
    from llguidance import StructTag

    if not isinstance(value, dict):
        raise ValueError("a structural tag must be an object")
    if "format" in value:
        value = value["format"]
        if value.get("type") != "triggered_tags":
            raise ValueError("only the format triggered_tags is supported")
        structures = [(tag["begin"], _schema_of(tag["content"]), tag["end"]) for tag in value["tags"]]
    else:
        structures = [(tag["begin"], tag.get("schema", {}), tag["end"]) for tag in value["structures"]]
    tags = []
    for begin, schema, end in structures:
        trigger = next((trigger for trigger in value["triggers"] if begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {begin[:64]!r}")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return tags


def _schema_of(content: dict[str, Any]) -> Any:
    if content.get("type") != "json_schema":
        raise ValueError("only json_schema is supported as the content of a tag")
    return content["json_schema"]


_TRANSLATORS = {
    ExtensionKind.GRAMMAR_JSON_SCHEMA: _json_schema,
    ExtensionKind.GRAMMAR_JSON_OBJECT: _json_object,
    ExtensionKind.GRAMMAR_REGEX: _regex,
    ExtensionKind.GRAMMAR_CHOICE: _choice,
    ExtensionKind.GRAMMAR_EBNF: _ebnf,
    ExtensionKind.GRAMMAR_STRUCTURAL_TAG: _structural_tag,
}
GRAMMAR_KINDS = frozenset(_TRANSLATORS)
