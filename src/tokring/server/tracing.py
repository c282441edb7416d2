"""OpenTelemetry spans of generation requests, where --otlp-traces-endpoint is given; else nothing of it is imported."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tokring.config import ConfigError
from tokring.server.generation import Outcome, usage_of
from tokring.server.token_path import Finish

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

OUTCOMES: web.RequestKey[Sequence[Outcome]] = web.RequestKey("outcomes", Sequence)  # of a request that was answered
FAILURE: web.RequestKey[int] = web.RequestKey("failure", int)  # status of an error that came behind the headers
FLUSH_TIMEOUT_S = 2.0
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "generate_content",
    "/invocations": "generate_content",
}


class Tracing:
    """Spans go to the collector from a thread of the SDK's, in batches; when its queue is full they are dropped.

    One SERVER span a request, a child of the client's span in `traceparent`, and below it the stages queue, prefill and
    decode of the choice that ended last. They are made when the request has ended: nothing is done per token.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint`: the collector's URL for traces by OTLP over HTTP. Raises ConfigError if packages are missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            message = f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'tokring[otel]'"
            raise ConfigError(message) from None
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes before our name.
        resource = Resource.create({"service.name": "tokring"}).merge(OTELResourceDetector().detect())
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("tokring")
        self._propagator = TraceContextTextMapPropagator()
        self._context_of = set_span_in_context
        self._server_kind, self._error_status = SpanKind.SERVER, StatusCode.ERROR
        self._model = model

    def record(self, request: web.Request, status: int, request_id: str, arrival_ns: int, end_ns: int) -> str:
        """The spans of a request that has ended, times on CLOCK_MONOTONIC. Returns its trace id; "": not traced."""
        operation = _OPERATIONS.get(request.path)
        if operation is None:
            return ""
        epoch_ns = time.time_ns() - time.monotonic_ns()
        parent = self._propagator.extract(dict(request.headers))
        span = self._tracer.start_span(
            f"{operation} {self._model}", parent, kind=self._server_kind, start_time=arrival_ns + epoch_ns
        )
        if span.is_recording():
            self._describe(span, request, request.get(FAILURE, status))
            span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.request.id": request_id})
            span.set_attribute("gen_ai.latency.e2e", (end_ns - arrival_ns) / 1e9)
            self._add_answer(span, request.get(OUTCOMES, ()), arrival_ns, epoch_ns)
        span.end(end_ns + epoch_ns)
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Sends what is left, in FLUSH_TIMEOUT_S at most: a collector that does not answer holds up no end."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(FLUSH_TIMEOUT_S)

    def _describe(self, span: Span, request: web.Request, status: int) -> None:
        attributes: dict[str, Any] = {
            "gen_ai.provider.name": "tokring",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "http.request.method": request.method,
            "url.path": request.path,
            "http.response.status_code": status,
        }
        if status >= 400:
            attributes["error.type"] = str(status)
        if status >= 500:
            span.set_status(self._error_status)
        span.set_attributes(attributes)

    def _add_answer(self, span: Span, outcomes: Sequence[Outcome], arrival_ns: int, epoch_ns: int) -> None:
        if not outcomes:
            return
        span.set_attributes(_request_attributes(outcomes))
        finishes = [one.finish for one in outcomes if one.finish is not None and one.finish.first_token_ns]
        if not finishes:
            return
        last = max(finishes, key=lambda finish: finish.end_ns)
        span.set_attributes(_latencies(last, arrival_ns))
        context = self._context_of(span)
        borders = (arrival_ns, last.scheduled_ns, last.first_token_ns, last.end_ns)
        for name, start_ns, stop_ns in zip(("queue", "prefill", "decode"), borders[:-1], borders[1:], strict=True):
            stage = self._tracer.start_span(name, context, start_time=start_ns + epoch_ns)
            stage.end(max(start_ns, stop_ns) + epoch_ns)


def _request_attributes(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of OpenTelemetry's conventions for generative AI, and those that vLLM names otherwise."""
    params, usage = outcomes[0].choice.prompt.params, usage_of(outcomes)
    optional = {"gen_ai.request.seed": params.seed, "gen_ai.request.stop_sequences": params.stop or None}
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.n": params.n,
        "gen_ai.response.finish_reasons": [outcome.finish_reason for outcome in outcomes],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
        "gen_ai.usage.num_sequences": len(outcomes),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _latencies(finish: Finish, arrival_ns: int) -> dict[str, float]:
    """vLLM's, in seconds."""
    return {
        "gen_ai.latency.time_in_queue": (finish.scheduled_ns - arrival_ns) / 1e9,
        "gen_ai.latency.time_to_first_token": (finish.first_token_ns - arrival_ns) / 1e9,
        "gen_ai.latency.time_in_model_prefill": (finish.first_token_ns - finish.scheduled_ns) / 1e9,
        "gen_ai.latency.time_in_model_decode": (finish.end_ns - finish.first_token_ns) / 1e9,
        "gen_ai.latency.time_in_model_inference": (finish.end_ns - finish.scheduled_ns) / 1e9,
    }
