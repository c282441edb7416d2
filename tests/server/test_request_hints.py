"""Headers and fields that say how a request is to be treated: deadlines, traces, routing, keys, pace."""

import asyncio
import logging
import os
from pathlib import Path

import pytest
from tests.server.harness import Harness, served

from tokring.config import ServerSettings
from tokring.launch.json_log import FIELDS, JsonFormatter
from tokring.server.api_keys import ApiKeys
from tokring.server.event_stream import EventStream

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@served()
async def test_the_access_log_names_the_trace_and_the_slowest_stage(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tokring.access")
    headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "X-Session-ID": "s1", "X-data-parallel-rank": "0"}
    body = {"prompt": "hello", "max_tokens": 2}
    assert (await harness.post("/v1/completions", body, headers=headers)).status == 200
    [record] = [record for record in caplog.records if record.name == "tokring.access"]
    fields = getattr(record, FIELDS)
    assert fields["trace_id"] == TRACE_ID and fields["slowest"] in ("queue", "prefill", "decode", "ipc", "detok")
    assert f"trace={TRACE_ID} slowest=" in record.getMessage()
    assert f'"trace_id":"{TRACE_ID}"' in JsonFormatter("frontend 0").format(record)


@served()
async def test_a_client_that_ends_its_connection_with_its_last_byte_has_been_answered(
    harness: Harness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_late(self: EventStream) -> None:
        await self._until_sent()
        await asyncio.Event().wait()  # the connection's end comes first

    monkeypatch.setattr(EventStream, "finish", too_late)
    caplog.set_level(logging.INFO, "tokring.access")
    reader, writer = await asyncio.open_connection(*harness.url.removeprefix("http://").split(":"))
    body = b'{"prompt": "hello", "max_tokens": 2, "stream": true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
    await harness.until(lambda: any(record.name == "tokring.access" for record in caplog.records))
    [record] = [record for record in caplog.records if record.name == "tokring.access"]
    assert getattr(record, FIELDS)["status"] == 200


@pytest.mark.parametrize(
    "value", ["", "00-zz", f"00-{'0' * 32}-00f067aa0ba902b7-01", f"ff-{TRACE_ID}-00f067aa0ba902b7-01"]
)
@served()
async def test_a_malformed_trace_is_left_alone(harness: Harness, caplog: pytest.LogCaptureFixture, value: str) -> None:
    caplog.set_level(logging.INFO, "tokring.access")
    await harness.get("/v1/models", headers={"traceparent": value})
    assert "trace=" not in caplog.text


@served()
async def test_a_ttft_objective_is_the_deadline_for_the_start(harness: Harness) -> None:
    body = {"prompt": "hello", "max_tokens": 2}
    assert (await harness.post("/v1/completions", body, headers={"x-slo-ttft-ms": "250"})).status == 200
    assert (await harness.post("/v1/completions", {**body, "timeout": 30})).status == 200
    assert (await harness.post("/v1/completions", body)).status == 200
    assert (await harness.post("/v1/completions", body, headers={"x-slo-ttft-ms": "1e-9"})).status == 200
    slo, timeout, none, least = (request.record for request in harness.engine.all_requests)
    assert slo["deadline_ns"] - slo["arrival_ns"] == 250_000_000
    assert timeout["deadline_ns"] - timeout["arrival_ns"] == 30_000_000_000
    assert none["deadline_ns"] == 0 and least["deadline_ns"] > least["arrival_ns"]


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_timeout_ends_a_request_with_a_408_and_in_the_engine(harness: Harness, stream: bool) -> None:
    harness.engine.hold()
    answer = await harness.complete(max_tokens=5, timeout=0.05, stream=stream)
    assert answer.status == 408 and answer.error["code"] == "timeout"
    await harness.all_slots_are_free()


@pytest.mark.parametrize(
    "headers",
    [{"x-slo-ttft-ms": "soon"}, {"x-slo-ttft-ms": "nan"}, {"x-slo-ttft-ms": "-1"}, {"X-data-parallel-rank": "1"}],
)
@served()
async def test_hints_that_make_no_sense_are_refused_by_name(harness: Harness, headers: dict[str, str]) -> None:
    answer = await harness.post("/v1/completions", {"prompt": "hello"}, headers=headers)
    assert answer.status == 400 and answer.error["param"] in headers


@served(stream_interval=4)
async def test_a_stream_interval_puts_tokens_together_but_not_the_first(harness: Harness) -> None:
    answer = await harness.complete(max_tokens=9, stream=True, return_token_ids=True)
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in answer.chunks if chunk["choices"][0].get("token_ids")]
    assert sizes == [1, 4, 4] and answer.text == (await harness.complete(max_tokens=9)).text


@served(max_queued_tokens=0)
async def test_prompts_beyond_the_kv_cache_and_the_queue_are_refused(harness: Harness) -> None:
    harness.engine.hold()
    prompt = [5] * 400  # the cache holds 1,024 tokens
    running = [asyncio.ensure_future(harness.complete(prompt, max_tokens=1)) for _ in range(2)]
    await harness.until(lambda: harness.client.in_flight == 2)
    refused = await harness.complete(prompt, max_tokens=1)
    assert (refused.status, refused.error["code"]) == (503, "overloaded") and int(refused.headers["Retry-After"]) > 0
    harness.engine.go_on()
    assert [answer.status for answer in await asyncio.gather(*running)] == [200, 200]
    assert (await harness.complete(prompt, max_tokens=1)).status == 200


@served()
async def test_the_longest_choice_is_counted_once_per_prompt(harness: Harness) -> None:
    await harness.complete(max_tokens=3, n=3)
    text = (await harness.get("/metrics")).body.decode()
    assert 'vllm:request_max_num_generation_tokens_count{model_name="tiny",engine="0"} 1' in text
    assert 'vllm:request_generation_tokens_count{model_name="tiny",engine="0"} 3' in text


def test_a_key_file_is_read_again_and_an_unreadable_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\none\n\n two \n")
    keys = ApiKeys(ServerSettings(api_key=("always",), api_key_file=str(path)))
    assert all(keys.accepts(f"Bearer {key}") for key in ("always", "one", "two"))
    path.write_text("three\n")
    keys.reload()
    assert keys.accepts("Bearer three") and keys.accepts("bearer always") and not keys.accepts("Bearer one")
    path.unlink()
    keys.reload()
    assert keys.accepts("Bearer three") and not keys.accepts("three") and not keys.accepts("")


def test_a_key_file_that_becomes_a_fifo_or_a_device_holds_nobody_up_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    keys = ApiKeys(ServerSettings(api_key_file=str(path)))
    path.unlink()
    os.mkfifo(path)
    keys.reload()
    path.unlink()
    path.symlink_to("/dev/zero")
    keys.reload()
    assert keys.accepts("Bearer one")
    assert [record.getMessage() for record in caplog.records] == [
        f"--api-key-file {path}: not a regular file; the old keys stay"
    ] * 2


def test_an_empty_key_file_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("")
    keys = ApiKeys(ServerSettings(api_key_file=str(path)))
    assert keys.is_needed and not keys.accepts("Bearer ")
