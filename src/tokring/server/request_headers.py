"""What a request's headers ask for besides its body: routing hints and the trace."""

import re

from aiohttp import web

from tokring.server.errors import invalid_request

TTFT_SLO = "x-slo-ttft-ms"
DATA_PARALLEL_RANK = "X-data-parallel-rank"
TRACE_PARENT = "traceparent"
MAX_SLO_MS = 3_600_000.0
# W3C Trace Context: version, trace id, parent id, flags; a trace id of zeros is none.
_TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def start_within_ns(request: web.Request) -> int:
    """x-slo-ttft-ms as nanoseconds within which work on the request must begin; 0: not given. Raises ApiError (400)."""
    text = request.headers.get(TTFT_SLO)
    if text is None:
        return 0
    try:
        slo_ms = float(text)
    except ValueError:
        slo_ms = 0.0
    if not 0 < slo_ms <= MAX_SLO_MS:
        raise invalid_request(f"{TTFT_SLO} must be above 0 and at most {MAX_SLO_MS:.0f} milliseconds.", TTFT_SLO)
    return max(1, int(slo_ms * 1e6))


def check_data_parallel_rank(request: web.Request) -> None:
    """There is one engine, of rank 0. Raises ApiError (400) for any other: its router believes in more."""
    rank = request.headers.get(DATA_PARALLEL_RANK, "0").strip()
    if rank != "0":
        raise invalid_request(f"{DATA_PARALLEL_RANK} must be 0: this server has one engine.", DATA_PARALLEL_RANK)


def trace_id_of(request: web.Request) -> str:
    """The trace id of a valid `traceparent`, else ""; W3C says to go on without a malformed one."""
    found = _TRACE_PARENT.fullmatch(request.headers.get(TRACE_PARENT, ""))
    return found[1] if found else ""
