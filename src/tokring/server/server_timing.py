"""Server-Timing: where a request's time went, as a header or, on streams, as a last comment."""

from collections.abc import Sequence

from tokring.server.generation import Outcome


def timing_header(outcomes: Sequence[Outcome], arrival_ns: int) -> str:
    """`queue;dur=…, prefill;dur=…, decode;dur=…` in milliseconds, of the choice that ended last; "" if unknown."""
    finishes = [outcome.finish for outcome in outcomes if outcome.finish is not None and outcome.finish.first_token_ns]
    if not finishes:
        return ""
    last = max(finishes, key=lambda finish: finish.end_ns)
    stages = (
        ("queue", last.scheduled_ns - arrival_ns),
        ("prefill", last.first_token_ns - last.scheduled_ns),
        ("decode", last.end_ns - last.first_token_ns),
    )
    return ", ".join(f"{name};dur={max(0, duration_ns) / 1e6:.3f}" for name, duration_ns in stages)


def timing_comment(outcomes: Sequence[Outcome], arrival_ns: int) -> bytes:
    """The same as a server-sent comment, which clients skip."""
    header = timing_header(outcomes, arrival_ns)
    return f": server-timing {header}\n\n".encode() if header else b""
