"""OpenTelemetry spans as a collector receives them: one a generation request, below the client's own span."""

import asyncio
import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.server.harness import MODEL, Harness, running_server

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """OTLP over HTTP: keeps the spans it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.requests: list[ExportTraceServiceRequest] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    @property
    def spans(self) -> list[Span]:
        resources = [resource for request in self.requests for resource in request.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        assert self.path == "/v1/traces"
        self.server.requests.append(ExportTraceServiceRequest.FromString(data))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the tests look at the spans."""


@contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def attributes_of(span: Span) -> dict[str, Any]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def spans_of(requests: Any, **settings: Any) -> tuple[list[Span], Collector]:
    """What the collector has got when the server has ended, after `requests(harness)`."""

    async def run(endpoint: str) -> None:
        async with asyncio.timeout(60), running_server(otlp_traces_endpoint=endpoint, **settings) as harness:
            await requests(harness)

    with collector() as found:
        asyncio.run(run(found.endpoint))
    return found.spans, found


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_below_the_clients_with_its_stages_below_it(stream: bool) -> None:
    async def requests(harness: Harness) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0.5}
        headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "X-Request-Id": "mine"}
        answer = await harness.post("/v1/chat/completions", {**body, "stream": stream, "top_p": 0.5}, headers=headers)
        assert answer.status == 200

    spans, found = spans_of(requests)
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    [request] = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert request.name == f"chat {MODEL}" and request.parent_span_id.hex() == SPAN_ID
    stages = {span.name: span for span in spans if span.parent_span_id == request.span_id}
    assert set(stages) == {"queue", "prefill", "decode"} and len(spans) == 4
    times = [request.start_time_unix_nano, stages["prefill"].start_time_unix_nano]
    times += [stages["decode"].start_time_unix_nano, stages["decode"].end_time_unix_nano, request.end_time_unix_nano]
    assert times == sorted(times)
    attributes = attributes_of(request)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
    }
    assert {key: attributes[key] for key in expected} == expected
    assert attributes["gen_ai.usage.input_tokens"] > 0
    latencies = [attributes[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert latencies == sorted(latencies)
    [resource] = {found.requests[0].resource_spans[0].resource.SerializeToString()}
    assert b"service.name" in resource and b"tokring" in resource


def test_refusals_and_failures_are_told_apart_and_probes_are_no_spans() -> None:
    async def requests(harness: Harness) -> None:
        for path in ("/health", "/v1/models", "/metrics"):
            await harness.get(path)
        await harness.complete(temperature=-1)
        harness.engine.hold()
        harness.engine.allow(1)
        stream = asyncio.ensure_future(harness.complete(stream=True, max_tokens=9))
        await harness.until(lambda: any(running.num_done for running in harness.engine.requests))
        harness.client.end_all("The server is shutting down.")
        assert '"error"' in (await stream).body.decode()

    spans, _ = spans_of(requests)
    assert [attributes_of(span)["http.response.status_code"] for span in spans] == [400, 503]
    assert [attributes_of(span)["error.type"] for span in spans] == ["400", "503"]
    assert [span.status.code for span in spans] == [Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR]


def test_what_the_client_does_not_sample_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    async def requests(harness: Harness) -> None:
        for flags in ("00", "01"):
            headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-{flags}"}
            await harness.post("/v1/completions", {"prompt": "hello", "max_tokens": 1}, headers=headers)
        await harness.complete(max_tokens=1)

    caplog.set_level("INFO", "tokring.access")
    spans, _ = spans_of(requests)
    traces = [span.trace_id.hex() for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert len(traces) == 2 and traces[0] == TRACE_ID != traces[1]
    assert f"trace={traces[1]}" in caplog.text  # one that the server began


def test_a_collector_that_is_not_there_holds_up_neither_requests_nor_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with running_server(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces") as harness:
            for _ in range(3):
                assert (await harness.complete(max_tokens=2)).status == 200

    asyncio.run(asyncio.wait_for(run(), 60))


def test_without_an_endpoint_nothing_of_it_is_loaded() -> None:
    program = "import tokring.server.serving, sys; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0
