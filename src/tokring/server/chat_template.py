"""ChatTemplate: a model's Jinja template, compiled once, sandboxed, with the extras Hugging Face templates rely on."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

RESERVED_KWARGS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"})


class ChatTemplateError(ValueError):
    """The template refused the conversation or failed on it; the message is fit for the client."""


class ChatTemplate:
    """Renders conversations. `special_tokens` are the strings templates name (bos_token, eos_token, …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # of Python's own compiler too: a break outside a loop
            raise ChatTemplateError(f"The chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises ChatTemplateError."""
        variables = {**self._special_tokens, **(kwargs or {})}
        variables.update(
            messages=messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt
        )
        try:
            text = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The chat template refused the conversation: {error}") from error
        except Exception as error:  # a template is a program: it raises what it likes
            raise ChatTemplateError(f"The chat template failed on the conversation: {error}") from error
        return _cut_after_final_message(text, messages) if continue_final_message else text


def _cut_after_final_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Drops what the template puts behind the last message, so that the model goes on writing it."""
    content = str(messages[-1]["content"]).strip()
    position = text.rfind(content)
    if not content or position < 0:
        raise ChatTemplateError("continue_final_message needs a last message with content that the template keeps.")
    return text[: position + len(content)]


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call: Callable[..., Any] = self.call_method
        return jinja2.nodes.CallBlock(call("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
