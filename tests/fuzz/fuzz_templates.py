"""Chat templates, bent or hostile, over random conversations: a text or a ChatTemplateError. `make fuzz-templates`."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

from tests.fuzz.campaign import bend, main
from tests.fuzz.random_json import TEXTS
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from tokring.checkpoint import CheckpointError, open_checkpoint
from tokring.server.chat_template import ChatTemplate, ChatTemplateError

PIECES = [
    *(
        "{% for message in messages %}",
        "{% endfor %}",
        "{% if loop.first %}",
        "{% else %}",
        "{% endif %}",
        "{% break %}",
    ),
    *("{{ message['role'] }}", "{{ message.content }}", "{{ messages[0]['content'] | trim }}", "{{ tools | tojson }}"),
    *("{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{% generation %}", "{% endgeneration %}"),
    *("{% macro f(x) %}", "{% endmacro %}", "{{ f(f) }}", "{% set ns = namespace(a=1) %}", "{% set ns.a = ns.a + 1 %}"),
    *("{{ ''.__class__.__mro__ }}", "{{ messages.__init__.__globals__ }}", "{{ self._TemplateReference__context }}"),
    *("{{ cycler.__init__.__globals__.os.popen('id') }}", "{{ ''|attr('__class__') }}", "{{ messages.append(1) }}"),
    *("{{ 1 / 0 }}", "{{ 2 ** 100 }}", "{{ undefined.x }}", "{{ undefined }}", "{{ 'a' * 100 }}", "{% include 'x' %}"),
    *(
        "{{ '%s' % messages }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% import 'os' as os %}",
        "{#",
        "#}",
        "{{",
        "%}",
        "x",
    ),
]
SECRETS = ("<class 'object'>", "uid=", "__builtins__", "<module ")


@functools.cache
def _templates() -> list[str]:
    """Real ones: those of the tests and, where it is installed, of the embedded model."""
    try:
        return [CHAT_TEMPLATE, *open_checkpoint(None).chat_templates.values()]
    except CheckpointError:
        return [CHAT_TEMPLATE]


def case(rng: random.Random) -> str:
    source = rng.choice(_templates())
    if rng.random() < 0.5:
        source = bend(source.encode(), rng).decode("utf-8", "replace")
    elif rng.random() < 0.8:
        source = "".join(rng.choices(PIECES, k=rng.randint(1, 12)))
    try:
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": rng.choice(TEXTS)})
        text = template.render(
            [_message(rng) for _ in range(rng.randint(0, 4))],
            tools=rng.choice([None, [], [{"type": "function", "function": {"name": _value(rng, 2)}}]]),
            add_generation_prompt=rng.random() < 0.5,
            kwargs={rng.choice(["enable_thinking", "ns", "loop", "x"]): _value(rng, 3)},
        )
    except ChatTemplateError:
        return "refused"
    assert not any(secret in text for secret in SECRETS), "the sandbox leaks"
    return "rendered"


def _message(rng: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": rng.choice(["system", "user", "assistant", "tool", "developer", "", "x"])}
    if rng.random() < 0.9:
        message["content"] = rng.choice(TEXTS)
    if rng.random() < 0.2:
        message["tool_calls"] = [{"function": {"name": "f", "arguments": _value(rng, 2)}}]
    return message


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6 if depth else 4)
    if kind == 4:
        return [_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == 5:
        return {rng.choice(TEXTS): _value(rng, depth - 1) for _ in range(rng.randint(0, 3))}
    return [None, rng.choice(TEXTS), rng.randint(-(2**70), 2**70), rng.random() * 1e300][kind]


if __name__ == "__main__":
    sys.exit(main(case))
