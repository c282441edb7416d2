"""Deadlines: until when work on a request must have begun, and until when it must be answered."""

import time
from dataclasses import dataclass

from aiohttp import web

from tokring.server.errors import invalid_request
from tokring.server.request_headers import start_within_ns

MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """CLOCK_MONOTONIC in ns; 0: none. `start_ns` is the engine's to watch, `end_ns` the front end's."""

    start_ns: int = 0
    end_ns: int = 0


NO_DEADLINES = Deadlines()


def deadlines_of(request: web.Request, arrival_ns: int, timeout_s: float | None) -> Deadlines:
    """From the x-slo-ttft-ms header and the body's `timeout` in seconds. Raises ApiError (400)."""
    start_within = start_within_ns(request)
    if timeout_s is None and not start_within:
        return NO_DEADLINES
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise invalid_request(f"timeout must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds.", "timeout")
    end_ns = arrival_ns + int(timeout_s * 1e9) if timeout_s is not None else 0
    start_ns = arrival_ns + start_within if start_within else end_ns
    return Deadlines(min(start_ns, end_ns) if end_ns else start_ns, end_ns)


def seconds_until(deadline_ns: int) -> float:
    return max(0, deadline_ns - time.monotonic_ns()) / 1e9
