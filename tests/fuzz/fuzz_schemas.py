"""Schemas, regexes, choices, grammars and tags that clients may send: compiled, or refused. `make fuzz-schemas`.

First the front end's checks, then the engine's compiler with its vetting process, then a walk through what came out.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import sys
from typing import Any

import numpy as np

from tests.fuzz.campaign import bend, main
from tests.fuzz.random_json import GRAMMARS, NUMBERS, REGEXES, TEXTS
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, tiny_tokenizer_json
from tokring.engine.grammar import Grammar, GrammarTokenizer
from tokring.engine.grammar_compiler import GrammarCompiler
from tokring.engine.grammar_text import GrammarError, GrammarUnavailableError
from tokring.engine.request import GrammarText
from tokring.sampling_params import ParameterError
from tokring.server.json_schema import check_json_schema
from tokring_ipc import ExtensionKind

TYPES = ["object", "array", "string", "number", "integer", "boolean", "null", "x", 3, ["string", "null"], []]
WALK_TOKENS = 24


@functools.cache
def _compiler() -> GrammarCompiler:
    return GrammarCompiler(GrammarTokenizer(tiny_tokenizer_json(), VOCAB_SIZE, [EOS_ID]))


def case(rng: random.Random) -> str:
    kind, text = rng.choice([_json_schema, _json_schema, _regex, _choice, _ebnf, _tag])(rng)
    if kind is ExtensionKind.GRAMMAR_JSON_SCHEMA:
        try:
            asyncio.run(check_json_schema(json.loads(text), "response_format"))
        except ParameterError:
            if rng.random() < 0.9:  # the others: from a front end that does not check
                return "schema refused by the front end"
    if rng.random() < 0.2:
        text = bend(text, rng)
    result = _compiler()._compile(GrammarText(kind, text), waited_s=0.0)
    name = kind.name.removeprefix("GRAMMAR_").lower()
    if isinstance(result, GrammarUnavailableError):
        return "not judged: a busy machine"
    if isinstance(result, GrammarError):
        return f"{name} refused"
    _walk(Grammar(_compiler().tokenizer, result, [EOS_ID]), rng)
    return f"{name} compiled"


def _walk(grammar: Grammar, rng: random.Random) -> None:
    mask = np.zeros(_compiler().tokenizer.mask_words, np.uint32)
    for _ in range(WALK_TOKENS):
        grammar.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if grammar.failure is not None or not len(allowed):
            return
        assert allowed[-1] < VOCAB_SIZE
        if not grammar.accept([int(rng.choice(allowed))]) or grammar.is_complete:
            return


def _json_schema(rng: random.Random) -> tuple[ExtensionKind, bytes]:
    return ExtensionKind.GRAMMAR_JSON_SCHEMA, json.dumps(schema(rng, rng.randint(0, 4))).encode("utf-8", "replace")


def schema(rng: random.Random, depth: int) -> Any:
    """A random JSON Schema, mostly well-formed."""
    if rng.random() < 0.05:
        return rng.choice([True, False, None, 3, [], "x"])
    made: dict[str, Any] = {"type": rng.choice(TYPES)} if rng.random() < 0.8 else {}
    for _ in range(rng.randint(0, 3)):
        made |= _keyword(rng, depth)
    return made


def _keyword(rng: random.Random, depth: int) -> dict[str, Any]:
    def child() -> Any:
        return schema(rng, depth - 1) if depth else {"type": "string"}

    def count() -> Any:
        return rng.choice([0, 1, 2, 5, 1000, 100_000, -1, 1.5, "x"])

    match rng.randrange(12):
        case 0:
            names = rng.sample(TEXTS[:12], rng.randint(0, 4))
            return {"properties": {name: child() for name in names}, "required": names[:2]}
        case 1:
            return {"items": child(), "minItems": count(), "maxItems": count()}
        case 2:
            return {rng.choice(["anyOf", "oneOf", "allOf", "prefixItems"]): [child() for _ in range(rng.randint(0, 3))]}
        case 3:
            return {"enum": rng.choices([*TEXTS, *NUMBERS, None, {}, []], k=rng.randint(0, 5))}
        case 4:
            return {"pattern": rng.choice(REGEXES)}
        case 5:
            return {"$ref": rng.choice(["#", "#/$defs/a", "#/x", "", "http://x/y", "#/%"]), "$defs": {"a": child()}}
        case 6:
            return {rng.choice(["minimum", "maximum", "exclusiveMinimum", "multipleOf"]): rng.choice(NUMBERS)}
        case 7:
            return {"minLength": count(), "maxLength": count()}
        case 8:
            return {"additionalProperties": child(), "patternProperties": {rng.choice(REGEXES): child()}}
        case 9:
            return {"const": rng.choice([*TEXTS, *NUMBERS, None])}
        case 10:
            return {"format": rng.choice(["date-time", "uuid", "email", "x", 3, "ipv4"])}
        case _:
            return {rng.choice(["not", "if", "then", "contains", "propertyNames", "dependentSchemas"]): child()}


def _regex(rng: random.Random) -> tuple[ExtensionKind, bytes]:
    text = "".join(
        rng.choices([*REGEXES, "|", "(", ")", "[a-z]", "{2,5}", "*", "+", "?", "é", "\\b"], k=rng.randint(1, 6))
    )
    return ExtensionKind.GRAMMAR_REGEX, text.encode()


def _choice(rng: random.Random) -> tuple[ExtensionKind, bytes]:
    return ExtensionKind.GRAMMAR_CHOICE, json.dumps(rng.choices([*TEXTS, 1], k=rng.randint(0, 5))).encode()


def _ebnf(rng: random.Random) -> tuple[ExtensionKind, bytes]:
    rules = [
        'root ::= a | "b" a',
        'a ::= "x" a?',
        'start: x+\nx: "y" | /[0-9]+/',
        "a ::= [a-z]{2,}",
        "%ignore /x/",
        "::=",
    ]
    return ExtensionKind.GRAMMAR_EBNF, "\n".join(rng.choices([*rules, *GRAMMARS], k=rng.randint(1, 4))).encode()


def _tag(rng: random.Random) -> tuple[ExtensionKind, bytes]:
    tag = {"begin": rng.choice(TEXTS), "schema": schema(rng, 2), "end": rng.choice(TEXTS)}
    value = {"type": "structural_tag", "structures": [tag] * rng.randint(0, 2), "triggers": rng.choices(TEXTS, k=2)}
    return ExtensionKind.GRAMMAR_STRUCTURAL_TAG, json.dumps(value).encode("utf-8", "replace")


if __name__ == "__main__":
    sys.exit(main(case))
