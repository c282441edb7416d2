"""Server-Timing: where a request's time went, as a header or, on streams, as a last comment."""

import time
from collections.abc import Iterable, Sequence

from tokring.server.generation import Outcome


def timing_header(outcomes: Sequence[Outcome], arrival_ns: int) -> str:
    """The stages of the choice that ended last, in milliseconds; "" if there was no token.

    queue, prefill and decode are the engine's times; ipc: from the first token's sampling to the front end; detok: from
    the last token's sampling until now, when the answer is ready to be sent. A stream that a stop string ended does not
    wait for the engine's last word: it has ttft, which is queue, prefill and ipc together, and decode.
    """
    finished = [
        (outcome.finish, outcome.first_output_ns)
        for outcome in outcomes
        if outcome.finish is not None and outcome.finish.first_token_ns
    ]
    if not finished:
        return _without_the_engine(outcomes, arrival_ns)
    last, first_output_ns = max(finished, key=lambda entry: entry[0].end_ns)
    stages = (
        ("queue", last.scheduled_ns - arrival_ns),
        ("prefill", last.first_token_ns - last.scheduled_ns),
        ("decode", last.end_ns - last.first_token_ns),
        ("ipc", first_output_ns - last.first_token_ns if first_output_ns else 0),
        ("detok", time.monotonic_ns() - last.end_ns),
    )
    return _header(stages)


def _without_the_engine(outcomes: Sequence[Outcome], arrival_ns: int) -> str:
    first_output_ns = max([outcome.first_output_ns for outcome in outcomes], default=0)
    if not first_output_ns:
        return ""
    return _header((("ttft", first_output_ns - arrival_ns), ("decode", time.monotonic_ns() - first_output_ns)))


def _header(stages: Iterable[tuple[str, int]]) -> str:
    return ", ".join([f"{name};dur={max(0, duration_ns) / 1e6:.3f}" for name, duration_ns in stages])


def slowest_stage(header: str) -> str:
    """The name of the longest stage of a timing_header()."""
    stages = [stage.split(";dur=") for stage in header.split(", ") if stage]
    return max(stages, key=lambda stage: float(stage[1]))[0] if stages else ""


def timing_comment(header: str) -> bytes:
    """The same as a server-sent comment, which clients skip."""
    return f": server-timing {header}\n\n".encode() if header else b""
