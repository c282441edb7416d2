"""What every answer goes through: request id, errors as OpenAI's error object, keys, CORS, counting, access log."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion10, HttpVersion11

from tokring.launch.json_log import FIELDS as JSON_FIELDS
from tokring.sampling_params import ParameterError
from tokring.server.errors import ApiError, internal_error, invalid_request
from tokring.server.event_stream import SENT_STATUS
from tokring.server.front_end import FrontEnd, Phase
from tokring.server.http_connection import HttpConnection
from tokring.server.request_headers import check_data_parallel_rank, trace_id_of
from tokring.server.request_id import REQUEST_ID, request_id_of
from tokring.server.server_timing import slowest_stage
from tokring.server.state_probes import PROBES

logger = logging.getLogger("tokring.access")
log = logging.getLogger(__name__)

FRONT_END: web.AppKey[FrontEnd] = web.AppKey("front_end", FrontEnd)
ARRIVAL_NS: web.RequestKey[int] = web.RequestKey("arrival_ns", int)
STAGES: web.RequestKey[str] = web.RequestKey("stages", str)  # where the time went, for the access log
TOLD_TO_GO_ON: web.RequestKey[bool] = web.RequestKey("told_to_go_on", bool)
LOAD_METRICS_FORMAT = "endpoint-load-metrics-format"  # ORCA: a balancer asks for the load with each answer
LOAD_METRICS = "endpoint-load-metrics"
_CLIENT_CLOSED_REQUEST = 499
_CORS_METHODS = "GET, POST, OPTIONS"
_CORS_MAX_AGE_S = "600"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: turns everything into an answer, counts and logs it."""
    started_ns = time.monotonic_ns()
    request[ARRIVAL_NS] = started_ns
    protocol = request.protocol
    if isinstance(protocol, HttpConnection):
        protocol.head_has_arrived()
    status = _CLIENT_CLOSED_REQUEST
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    finally:
        # A client that has read its last byte may end the connection, and this task, before we are back here.
        _record(request, request.get(SENT_STATUS, status), time.monotonic_ns() - started_ns)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    front_end = request.app[FRONT_END]
    try:
        if request.version not in (HttpVersion10, HttpVersion11):
            return _refuse_version(request)
        if request.method == hdrs.METH_OPTIONS:
            return _preflight(request)
        _check_expectation(request)
        _check_key(request, front_end)
        check_data_parallel_rank(request)
        return await handler(request)
    except (ApiError, ParameterError) as error:
        refusal = error if isinstance(error, ApiError) else invalid_request(error.message, error.param)
        front_end.stats.rejected(refusal)
        return error_response(refusal)
    except web.HTTPException as error:
        return error_response(_as_api_error(request, error))
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception:
        log.exception("%s %s failed (request id %s)", request.method, request.path, request_id_of(request))
        return error_response(internal_error())


def error_response(error: ApiError) -> web.Response:
    return web.Response(status=error.status, body=error.body(), content_type="application/json", headers=error.headers)


def _refuse_version(request: web.Request) -> web.Response:
    """HTTP/0.9 and HTTP/2.0 in the form of HTTP/1.1 (RFC 9110, 15.6.6)."""
    request._cache["version"] = HttpVersion11  # aiohttp puts the request's version into the status line
    response = error_response(ApiError(505, "This server speaks HTTP/1.1 and HTTP/1.0."))
    response.force_close()
    return response


def _as_api_error(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals (404, 405, …) in our shape."""
    headers = {"Allow": error.headers[hdrs.ALLOW]} if hdrs.ALLOW in error.headers else {}
    if error.status == 404:
        return ApiError(404, f"There is no {request.method} {request.path[:200]}.", code="not_found")
    if error.status == 405:
        return ApiError(405, f"{request.path[:200]} does not allow {request.method}.", headers=headers)
    return ApiError(error.status, error.text or error.reason, headers=headers)


def _check_key(request: web.Request, front_end: FrontEnd) -> None:
    if not front_end.api_keys.is_needed or request.path in PROBES:
        return
    if not front_end.api_keys.accepts(request.headers.get(hdrs.AUTHORIZATION, "")):
        raise ApiError(
            401,
            "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={hdrs.WWW_AUTHENTICATE: "Bearer"},
        )


def _preflight(request: web.Request) -> web.Response:
    """A browser asks what a page from elsewhere may send (CORS); `add_common_headers` says from where."""
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: _CORS_METHODS,
        hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*"),
        hdrs.ACCESS_CONTROL_MAX_AGE: _CORS_MAX_AGE_S,
        hdrs.ALLOW: _CORS_METHODS,
    }
    return web.Response(status=204, headers=headers)


async def expect(request: web.Request) -> None:
    """Nothing yet, where aiohttp's own says "100 Continue": only `go_on` does, when a handler wants the body."""


async def go_on(request: web.Request) -> None:
    """Tells a client that asked before it sent its body to send it."""
    if _asks_first(request):
        request[TOLD_TO_GO_ON] = True
        writer = request.writer
        await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.output_size = 0  # the answer has not begun


def _asks_first(request: web.Request) -> bool:
    """HTTP/1.0 knows no expectations (RFC 9110: ignored)."""
    return hdrs.EXPECT in request.headers and request.version >= HttpVersion11


def _check_expectation(request: web.Request) -> None:
    expectation = request.headers.get(hdrs.EXPECT, "")
    if _asks_first(request) and expectation.lower() != "100-continue":
        raise ApiError(417, f"The expectation {expectation[:80]!r} cannot be met.")


async def add_common_headers(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: request id, CORS, and an end of keep-alive while draining or when a body may not come."""
    front_end = request.app[FRONT_END]
    response.headers[REQUEST_ID] = request_id_of(request)
    origin = request.headers.get(hdrs.ORIGIN)
    allowed = front_end.config.server.allowed_origins
    if origin is not None and ("*" in allowed or origin in allowed):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*" if "*" in allowed else origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = f"{REQUEST_ID}, Retry-After, Server-Timing"
        if "*" not in allowed:
            response.headers[hdrs.VARY] = hdrs.ORIGIN
    load_format = request.headers.get(LOAD_METRICS_FORMAT)
    if load_format is not None:
        response.headers[LOAD_METRICS] = front_end.pages.load_metrics(load_format)
    # Told neither to send its body nor not to, a client may do either: what it sends next could be one or a request.
    has_open_question = _asks_first(request) and not request.get(TOLD_TO_GO_ON, False)
    if front_end.phase is Phase.DRAINING or front_end.is_retiring or has_open_question:
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"  # force_close alone comes too late for the header


def _record(request: web.Request, status: int, duration_ns: int) -> None:
    front_end = request.app[FRONT_END]
    path = request.path
    if path in PROBES:
        return
    front_end.stats.http_request(request, status, duration_ns)
    trace_id = trace_id_of(request)
    if front_end.tracing is not None:
        ended_ns = request[ARRIVAL_NS] + duration_ns
        traced = front_end.tracing.record(request, status, request_id_of(request), request[ARRIVAL_NS], ended_ns)
        trace_id = traced or trace_id
    if path not in front_end.config.server.disable_access_log_for_endpoints:
        _log_access(request, status, duration_ns, trace_id)


def _log_access(request: web.Request, status: int, duration_ns: int, trace_id: str) -> None:
    """One line: what, how it ended, how long it took, and which stage took longest."""
    fields = {
        "method": request.method,
        "path": request.path,
        "status": status,
        "duration_ms": round(duration_ns / 1e6, 3),
        "request_id": request_id_of(request),
    }
    stages = request.get(STAGES, "")
    line = f"{request.method} {request.path} {status} {duration_ns / 1e6:.1f} ms id={fields['request_id']}"
    if trace_id:
        fields["trace_id"] = trace_id
        line += f" trace={trace_id}"
    if stages:
        fields["stages"], fields["slowest"] = stages, slowest_stage(stages)
        line += f" slowest={fields['slowest']} ({stages})"
    logger.info("%s", line, extra={JSON_FIELDS: fields})
