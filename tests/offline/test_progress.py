"""The progress bar of a batch."""

import io

from rich.console import Console

from tokring.offline.output import RequestOutput, Usage
from tokring.offline.progress import Progress


def output(num_tokens: int) -> RequestOutput:
    usage = Usage(prompt_tokens=1, completion_tokens=num_tokens, cached_tokens=0)
    return RequestOutput(prompt=None, prompt_token_ids=[1], usage=usage)


def shown(*, is_shown: bool, is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
    with Progress(3, is_shown=is_shown, console=console) as progress:
        for _ in range(3):
            progress.count(output(10))
            progress.draw()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_sees_how_many_prompts_are_complete() -> None:
    text = shown(is_shown=True, is_terminal=True)
    assert "3/3" in text and "tokens/s" in text


def test_nothing_is_drawn_where_nobody_looks_or_wants_it() -> None:
    assert shown(is_shown=True, is_terminal=False) == ""
    assert shown(is_shown=False, is_terminal=True) == ""
