"""Around the answers: routes, keys, CORS, ids, disconnects, overload, engine death, drain, probes."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.harness import MODEL, Harness, served
from tests.server.test_refusals import check_error

from tokring.server.application import create_app
from tokring.server.errors import ApiError
from tokring.server.front_end import Phase


async def raw(harness: Harness, data: bytes, *, until_close: bool = True) -> bytes:
    """What the server answers to literal bytes on one connection."""
    host, port = harness.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    if until_close:
        answer = await reader.read()
    else:
        answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return answer


def request_bytes(path: str, body: bytes, *, version: str = "1.1", close: bool = True) -> bytes:
    end = b"Connection: close\r\n" if close else b""
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + end + b"\r\n" + body


@served()
async def test_wrong_paths_and_methods_are_errors_in_our_shape(harness: Harness) -> None:
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("PUT", "/v1/models", 405),
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%00", 404),
    ):
        check_error(await harness.request(method, path), statuses=range(status, status + 1))
    assert (await harness.request("DELETE", "/v1/completions")).headers["Allow"] == "POST"


@served()
async def test_head_and_preflight_do_no_harm(harness: Harness) -> None:
    for path in ("/health", "/v1/models"):
        answer = await harness.request("HEAD", path)
        assert answer.status == 200 and answer.body == b""
    asked = {"Origin": "http://a.example", "Access-Control-Request-Headers": "content-type,authorization"}
    answer = await harness.request("OPTIONS", "/v1/chat/completions", headers=asked)
    assert answer.status == 204
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert answer.headers["Access-Control-Allow-Headers"] == "content-type,authorization"
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]


@served(allowed_origins=("http://good.example",))
async def test_only_allowed_origins_may_read_answers(harness: Harness) -> None:
    good = await harness.get("/v1/models", headers={"Origin": "http://good.example"})
    bad = await harness.get("/v1/models", headers={"Origin": "http://bad.example"})
    assert good.headers["Access-Control-Allow-Origin"] == "http://good.example" and good.headers["Vary"] == "Origin"
    assert "Access-Control-Allow-Origin" not in bad.headers


@served(api_key=("secret", "other"))
async def test_keys_guard_every_route_but_the_probes(harness: Harness) -> None:
    for value in (None, "Bearer wrong", "Bearer", "Bearer ", "Basic eDp5", "bearer-x", "Bearer é", "secret"):
        headers = {} if value is None else {"Authorization": value}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/nope"):
            check_error(await harness.request("POST", path, json={}, headers=headers), statuses=range(401, 402))
        assert (await harness.get("/v1/models", headers=headers)).status == 401
        for probe in ("/health", "/health/live", "/ping", "/metrics", "/version", "/load"):
            assert (await harness.get(probe, headers=headers)).status == 200
    for key in ("secret", "other"):
        assert (await harness.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status == 200


@served()
async def test_models_are_described(harness: Harness) -> None:
    listed = (await harness.get("/v1/models")).json
    [card] = listed["data"]
    assert listed["object"] == "list" and card["id"] == MODEL
    assert card["max_model_len"] == harness.front_end.limits.max_model_len
    assert {"object", "created", "owned_by", "root", "parent", "permission"} <= set(card)
    assert (await harness.get(f"/v1/models/{MODEL}")).json == card
    check_error(await harness.get("/v1/models/none"), "model", range(404, 405))


@served()
async def test_request_ids_are_taken_over_made_and_bounded(harness: Harness) -> None:
    async def tell(tag: int, request_id: str) -> Any:
        body = {"model": MODEL, "prompt": f"tag{tag}", "echo": True, "max_tokens": 3, "temperature": 0}
        return await harness.post("/v1/completions", body, headers={"X-Request-Id": request_id})

    answers = await asyncio.gather(*(tell(tag, "same-id") for tag in range(6)))
    for tag, answer in enumerate(answers):
        assert answer.text.startswith(f"tag{tag}") and answer.headers["X-Request-Id"] == "same-id"
        assert answer.json["id"] == "cmpl-same-id"
    assert (await harness.complete(max_tokens=1, request_id="mine")).json["id"] == "cmpl-mine"
    check_error(await harness.complete(request_id="a b"), "request_id")
    for odd in ("x" * 4000, "üä", "a b", "", "{}%s%n"):
        answer = await tell(1, odd)
        assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["X-Request-Id"])


@served()
async def test_a_disconnect_cancels_in_the_engine_and_frees_the_slot(harness: Harness) -> None:
    harness.engine.hold()
    for stream in (True, False):
        task = asyncio.ensure_future(harness.chat(stream=stream))
        await harness.until(lambda: bool(harness.engine.requests))
        task.cancel()
        await harness.all_slots_are_free()
        assert harness.engine.requests == []


@served()
async def test_a_client_that_leaves_mid_stream_frees_its_slot(harness: Harness) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 400, "temperature": 0, "stream": True}
    async with harness.session.post(harness.url + "/v1/completions", json=body) as response:
        await response.content.readline()
        response.close()
    await harness.all_slots_are_free()
    assert harness.client.connections == {}


@served(max_in_flight=3)
async def test_overload_is_a_503_before_the_headers(harness: Harness) -> None:
    harness.engine.hold()
    tasks = [asyncio.ensure_future(harness.chat(max_tokens=3, stream=bool(n % 2))) for n in range(3)]
    await harness.until(lambda: len(harness.engine.requests) == 3)
    for stream in (False, True):
        refused = await harness.chat(max_tokens=3, stream=stream)
        check_error(refused, statuses=range(503, 504))
        assert int(refused.headers["Retry-After"]) >= 1 and refused.error["code"] == "overloaded"
    harness.engine.go_on()
    assert [answer.status for answer in await asyncio.gather(*tasks)] == [200, 200, 200]
    await harness.all_slots_are_free()


@served()
async def test_an_engine_death_ends_every_pending_request_with_an_error(harness: Harness) -> None:
    harness.engine.hold()
    whole = asyncio.ensure_future(harness.chat())
    streamed = asyncio.ensure_future(harness.chat(stream=True))
    await harness.until(lambda: len(harness.engine.requests) == 2)
    await asyncio.sleep(0.05)  # the stream's headers are out
    await asyncio.to_thread(harness.engine.die)
    check_error(await whole, statuses=range(503, 504))
    answer = await streamed
    assert answer.status == 200
    assert answer.chunks[-1]["error"]["code"] == "engine_dead" and answer.events[-1] == "[DONE]"
    check_error(await harness.chat(), statuses=range(503, 504))
    assert (await harness.get("/health")).status == 503
    assert (await harness.get("/health/live")).status == 503
    assert (await harness.get("/metrics")).status == 200
    await harness.all_slots_are_free()


@served()
async def test_while_loading_every_route_says_so(harness: Harness) -> None:
    for phase in (Phase.STARTING, Phase.LOADING_TOKENIZER, Phase.WAITING_FOR_ENGINE):
        harness.front_end.phase = phase
        for answer in (await harness.chat(), await harness.get("/v1/models")):
            check_error(answer, statuses=range(503, 504))
            assert str(phase) in answer.error["message"] and answer.headers["Retry-After"]
        health = await harness.get("/health")
        assert health.status == 503 and str(phase) in health.json["reason"]
        assert (await harness.get("/health/live")).status == 200
        assert (await harness.get("/health/started")).status == 503
    harness.front_end.phase = Phase.READY
    assert (await harness.get("/health/started")).status == 200
    assert (await harness.get("/health/ready")).status == 200


@served()
async def test_a_drain_refuses_new_requests_and_lets_running_ones_finish(harness: Harness) -> None:
    harness.engine.hold()
    running = asyncio.ensure_future(harness.chat(max_tokens=5, stream=True))
    await harness.until(lambda: bool(harness.engine.requests))
    harness.front_end.drain()
    refused = await harness.chat()
    check_error(refused, statuses=range(503, 504))
    assert refused.headers["Connection"].lower() == "close" and refused.error["code"] == "draining"
    assert (await harness.get("/health")).status == 503
    assert not harness.front_end.all_answered.is_set()
    harness.engine.go_on()
    assert (await running).finish_reasons == ["length"]
    await harness.front_end.all_answered.wait()


@served()
async def test_what_a_drain_cannot_wait_for_ends_with_an_error_event(harness: Harness) -> None:
    harness.engine.hold()
    running = asyncio.ensure_future(harness.chat(stream=True))
    await harness.until(lambda: bool(harness.engine.requests))
    await asyncio.sleep(0.05)  # the stream's headers are out
    harness.front_end.drain()
    harness.client.end_all("The server is shutting down.")
    answer = await running
    assert answer.chunks[-1]["error"]["code"] == "shutting_down"
    await harness.all_slots_are_free()


@served()
async def test_http_1_0_streams_without_chunk_framing(harness: Harness) -> None:
    body = b'{"prompt":"hello","max_tokens":3,"temperature":0,"stream":true}'
    answer = await raw(harness, request_bytes("/v1/completions", body, version="1.0"))
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


@served()
async def test_pipelined_requests_are_answered_in_order(harness: Harness) -> None:
    bodies = [b'{"prompt":"hello","max_tokens":%d,"temperature":0,"stream":true}' % count for count in (1, 2)]
    data = request_bytes("/v1/completions", bodies[0], close=False) + request_bytes("/v1/completions", bodies[1])
    answer = await raw(harness, data)
    assert answer.count(b"HTTP/1.1 200 OK") == 2 and answer.count(b"data: [DONE]") == 2


@served()
async def test_a_connection_is_reused_after_a_stream(harness: Harness) -> None:
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        harness.session = session
        for _ in range(3):
            assert (await harness.chat(max_tokens=3, stream=True)).finish_reasons == ["length"]
            assert (await harness.chat(max_tokens=3)).finish_reasons == ["length"]
        [[(protocol, *_)]] = [list(connections) for connections in connector._conns.values()]
        assert protocol is not None


@served()
async def test_a_silent_stream_is_pinged(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokring.server.event_stream.PING_AFTER_NS", 0)
    harness.engine.hold()
    running = asyncio.ensure_future(harness.chat(max_tokens=2, stream=True))
    await harness.until(lambda: bool(harness.client.connections))
    [stream] = harness.client.connections.values()
    await harness.until(lambda: stream._is_attached)  # type: ignore[attr-defined]
    stream.tick(2**62)
    harness.engine.go_on()
    answer = await running
    assert b"\n\n: ping\n\n" in answer.body and answer.finish_reasons == ["length"]


@served()
async def test_a_slow_client_gets_everything_in_the_end(harness: Harness) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 300, "temperature": 0, "stream": True, "logprobs": 5}
    async with harness.session.post(harness.url + "/v1/completions", json=body) as response:
        await harness.until(lambda: not harness.engine.requests and bool(harness.engine.finished))
        data = await response.read()
    assert data.endswith(b"data: [DONE]\n\n")
    await harness.all_slots_are_free()


@served(ssl_certfile=str(Path(__file__).parent / "data" / "localhost.pem"))
async def test_streams_over_tls_are_the_same(harness: Harness) -> None:
    """The token path hands bytes back: nothing but the transport can write to an encrypted connection."""
    for n in (1, 3):
        streamed = await harness.complete(max_tokens=20, temperature=1, seed=4, n=n, stream=True)
        whole = await harness.complete(max_tokens=20, temperature=1, seed=4, n=n)
        assert streamed.texts == whole.texts and streamed.finish_reasons == ["length"] * n
    await harness.all_slots_are_free()


METRICS_CONTRACT = """
vllm:num_requests_running vllm:num_requests_waiting vllm:num_requests_waiting_by_reason vllm:kv_cache_usage_perc
vllm:gpu_cache_usage_perc vllm:cache_config_info vllm:prefix_cache_queries vllm:prefix_cache_hits
vllm:gpu_prefix_cache_queries vllm:gpu_prefix_cache_hits vllm:num_preemptions vllm:prompt_tokens
vllm:prompt_tokens_cached vllm:generation_tokens vllm:request_success vllm:iteration_tokens_total
vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds vllm:request_time_per_output_token_seconds
vllm:e2e_request_latency_seconds vllm:request_queue_time_seconds vllm:request_prefill_time_seconds
vllm:request_decode_time_seconds vllm:request_inference_time_seconds vllm:request_prompt_tokens
vllm:request_generation_tokens vllm:request_max_num_generation_tokens vllm:request_params_max_tokens
vllm:request_prefill_kv_computed_tokens vllm:request_params_n http_requests http_request_duration_seconds
http_request_duration_highr_seconds process_cpu_seconds process_resident_memory_bytes tokring:ring_used_bytes
tokring:ring_capacity_bytes tokring:ring_full tokring:ring_frames tokring:ring_records tokring:doorbells
tokring:ring_hop_seconds tokring:engine_step_seconds tokring:engine_heartbeat_age_seconds tokring:engine_restarts
tokring:frontend_restarts tokring:requests_resumed tokring:surplus_tokens tokring:event_loop_lag_seconds
tokring:requests_rejected vllm:spec_decode_num_drafts vllm:spec_decode_num_draft_tokens
vllm:spec_decode_num_accepted_tokens vllm:spec_decode_num_accepted_tokens_per_pos
"""


async def samples(harness: Harness) -> dict[str, float]:
    answer = await harness.get("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.body.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert set(METRICS_CONTRACT.split()) <= set(names), set(METRICS_CONTRACT.split()) - set(names)
    found = {}
    for family in families:
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            found[f"{sample.name}{labels or ''}"] = sample.value
    return found


@served()
async def test_metrics_hold_every_name_of_the_contract_and_count(harness: Harness) -> None:
    before = await samples(harness)
    assert (await harness.complete(max_tokens=5)).status == 200
    assert (await harness.complete(temperature=-1)).status == 400
    harness.engine.hold()
    task = asyncio.ensure_future(harness.chat())
    await harness.until(lambda: bool(harness.engine.requests))
    task.cancel()
    await harness.all_slots_are_free()
    after = await samples(harness)
    assert all(after[name] >= value for name, value in before.items() if "_total" in name or "_bucket" in name)
    assert after["vllm:request_success_total{'finished_reason': 'length'}"] == 1
    assert after["vllm:request_success_total{'finished_reason': 'abort'}"] == 1
    assert after["vllm:generation_tokens_total"] == 5
    assert after["vllm:time_to_first_token_seconds_count"] == 1
    assert after["vllm:inter_token_latency_seconds_count"] == 4
    assert after["vllm:e2e_request_latency_seconds_count"] == 2
    assert after["tokring:requests_rejected_total{'reason': 'invalid'}"] == 1
    good = "http_requests_total{'handler': '/v1/completions', 'method': 'POST', 'status': '2xx'}"
    assert after[good] == 1


@served()
async def test_probes_answer(harness: Harness) -> None:
    assert (await harness.get("/version")).json["version"]
    assert (await harness.get("/load")).json["server_load"] == 0
    assert (await harness.get("/ping")).status == 200
    assert (await harness.request("POST", "/ping")).status == 200


@served()
async def test_every_route_is_described(harness: Harness) -> None:
    document = (await harness.get("/openapi.json")).json
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    routes = create_app(harness.front_end).router.routes()
    served = {(route.method, route.resource.canonical) for route in routes if route.resource is not None}
    assert {(method, path) for method, path in served if method != "HEAD"} == described - {
        ("PARAMETERS", "/v1/models/{id}")
    }
    schemas = document["components"]["schemas"]
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]
    assert "token_ids" in schemas["GenerateRequest"]["properties"]


def test_errors_clean_their_text() -> None:
    body = ApiError(400, "x" * 10_000 + "\ud83d", param="\udc00").body()
    assert len(body) < 3000 and b"\\ud83d" not in body


@served()
async def test_the_load_rides_on_an_answer_for_balancers_that_ask(harness: Harness) -> None:
    for load_format, expected in (("JSON", 'JSON {"named_metrics":'), ("TEXT", "TEXT named_metrics.kv_cache")):
        answer = await harness.get("/v1/models", headers={"endpoint-load-metrics-format": load_format})
        assert answer.headers["endpoint-load-metrics"].startswith(expected)
    assert "endpoint-load-metrics" not in (await harness.get("/v1/models")).headers


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n A: folded\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
@served()
async def test_what_is_no_http_is_a_400_in_our_shape(harness: Harness, data: bytes) -> None:
    answer = await raw(harness, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer[:200]
    assert b"application/json" in head and b"Traceback" not in body
    assert b'"error":{"message":' in body


@served()
async def test_a_client_that_never_reads_is_given_up_and_harms_nobody(harness: Harness) -> None:
    host, port = harness.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    body = b'{"prompt":"hello","max_tokens":400,"temperature":0,"stream":true,"logprobs":5,"n":8}'
    writer.write(request_bytes("/v1/completions", body))
    await harness.until(lambda: len(harness.engine.requests) == 8)
    assert (await harness.chat(max_tokens=5, stream=True)).finish_reasons == ["length"]
    await harness.until(lambda: not harness.engine.requests)
    writer.transport.abort()
    await harness.all_slots_are_free()
    assert harness.client.connections == {}


@served()
async def test_many_short_requests_leave_no_slot_and_no_descriptor_behind(harness: Harness) -> None:
    async def ask(number: int) -> None:
        answer = await harness.chat(max_tokens=2, stream=bool(number % 2))
        assert answer.finish_reasons == ["length"]

    for number in range(20):
        await ask(number)
    await harness.all_slots_are_free()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        await ask(number)
    await harness.all_slots_are_free()
    assert len(os.listdir("/proc/self/fd")) == before
    assert harness.client.connections == {}


@served()
async def test_last_text_finish_usage_and_end_of_the_body_leave_in_one_send(harness: Harness) -> None:
    before = harness.client.token_path.counters()["sends"]
    answer = await harness.chat(max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 3
    assert harness.client.token_path.counters()["sends"] - before == 3  # one per token


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_usage_is_complete_after_a_stop_string(harness: Harness, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await harness.complete(max_tokens=30, stop=" sat", **options)
    usage = answer.chunks[-1]["usage"] if stream else answer.json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@served()
async def test_stages_of_a_request_are_in_its_answer(harness: Harness) -> None:
    answer = await harness.complete(max_tokens=3)
    stages = [stage.split(";")[0] for stage in answer.headers["Server-Timing"].split(", ")]
    assert stages == ["queue", "prefill", "decode", "ipc", "detok"]
    stream = await harness.complete(max_tokens=3, stream=True)
    assert stream.body.count(b": server-timing queue;dur=") == 1


@served()
async def test_a_stream_that_a_stop_string_ends_says_where_its_time_went_too(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tokring.access")
    answer = await harness.complete(max_tokens=30, stop=" sat", stream=True)
    [comment] = [line for line in answer.body.split(b"\n") if line.startswith(b": server-timing ")]
    assert re.fullmatch(rb": server-timing (queue;dur=[0-9.]+, prefill|ttft);dur=.*decode;dur=[0-9.]+.*", comment)
    await harness.until(lambda: "slowest=" in caplog.text)
