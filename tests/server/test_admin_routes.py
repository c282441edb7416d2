"""The routes of --admin-routes: whom they are open to, what they ask of the engine, and what if it does not answer."""

import asyncio
from pathlib import Path

from tests.server.harness import Answer, Harness, served

from tokring.server.application import create_app
from tokring.server.http_series import HANDLERS
from tokring_ipc import CallStatus, ControlMethod

REPOSITORY = Path(__file__).parents[2]
ROUTES = [("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/reset_prefix_cache")]


def check_error(answer: Answer, status: int, code: str, param: str | None = None) -> None:
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param)
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert (status == 503) == ("Retry-After" in answer.headers)


@served()
async def test_without_the_flag_there_are_no_such_routes(harness: Harness) -> None:
    for method, path in ROUTES:
        check_error(await harness.request(method, path), 404, "not_found")
    assert not {path for _, path in ROUTES} & set((await harness.get("/openapi.json")).json["paths"])
    assert harness.engine.calls == []


@served(admin_routes=True)
async def test_with_it_each_asks_the_engine_for_one_thing(harness: Harness) -> None:
    assert (await harness.get("/is_paused")).json == {"is_paused": False}
    assert (await harness.request("POST", "/pause")).json == {"status": "paused"}
    assert (await harness.request("POST", "/resume")).json == {"status": "resumed"}
    assert (await harness.request("POST", "/reset_prefix_cache")).json == {"status": "reset"}
    assert harness.engine.calls == [ControlMethod.PAUSE, ControlMethod.RESUME, ControlMethod.RESET_PREFIX_CACHE]
    check_error(await harness.get("/pause"), 405, "method_not_allowed")


@served(admin_routes=True, api_key=("secret",))
async def test_they_need_the_key_that_probes_do_not(harness: Harness) -> None:
    for method, path in ROUTES:
        check_error(await harness.request(method, path), 401, "invalid_api_key")
    assert harness.engine.calls == []
    assert (await harness.get("/health")).status == 200
    answer = await harness.request("POST", "/pause", headers={"Authorization": "Bearer secret"})
    assert (answer.status, harness.engine.calls) == (200, [ControlMethod.PAUSE])


@served(admin_routes=True)
async def test_what_vllm_does_besides_is_refused_by_name(harness: Harness) -> None:
    for query in ("mode=abort", "mode=wait", "wait_for_inflight_requests=false", "clear_cache=true"):
        answer = await harness.request("POST", f"/pause?{query}")
        check_error(answer, 400, "unsupported_parameter", query.partition("=")[0])
    answer = await harness.request("POST", "/reset_prefix_cache?reset_external=True")
    check_error(answer, 400, "unsupported_parameter", "reset_external")
    assert harness.engine.calls == []
    assert (await harness.request("POST", "/pause?mode=keep&clear_cache=False")).status == 200
    assert (await harness.request("POST", "/reset_prefix_cache?reset_running_requests=true")).status == 200


@served(admin_routes=True)
async def test_an_engine_that_serves_no_such_call_says_so(harness: Harness) -> None:
    harness.engine.call_status = CallStatus.UNKNOWN_METHOD
    answer = await harness.request("POST", "/pause")
    check_error(answer, 501, "not_implemented")
    assert answer.error["message"] == "A script has no cache."


@served(admin_routes=True, restarts=True)
async def test_an_engine_that_dies_or_is_gone_is_a_503(harness: Harness) -> None:
    harness.engine.call_status = None
    asking = asyncio.ensure_future(harness.request("POST", "/pause"))
    await harness.until(lambda: harness.engine.calls == [ControlMethod.PAUSE])
    await harness.engine_dies()
    check_error(await asking, 503, "unavailable")
    check_error(await harness.request("POST", "/resume"), 503, "unavailable")
    await harness.next_engine()
    assert (await harness.request("POST", "/resume")).status == 200
    assert harness.engine.calls == [ControlMethod.RESUME]


@served(admin_routes=True)
async def test_a_drain_can_be_helped_by_a_resume(harness: Harness) -> None:
    harness.front_end.drain()
    check_error(await harness.complete(), 503, "draining")
    assert (await harness.request("POST", "/resume")).status == 200
    assert harness.engine.calls == [ControlMethod.RESUME]


@served(admin_routes=True)
async def test_every_route_is_described_documented_and_counted(harness: Harness) -> None:
    document = (await harness.get("/openapi.json")).json
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    resources = [(route.method, route.resource) for route in create_app(harness.front_end).router.routes()]
    served_routes = {(method, resource.canonical) for method, resource in resources if resource is not None}
    assert {one for one in served_routes if one[0] != "HEAD"} == described - {("PARAMETERS", "/v1/models/{id}")}
    assert set(ROUTES) <= described
    api, readme = ((REPOSITORY / name).read_text(encoding="utf-8") for name in ("docs/api.md", "README.md"))
    assert [path for _, path in described if path not in api] == []
    assert [path for _, path in ROUTES if path not in readme] == []
    assert {path for _, path in ROUTES} <= set(HANDLERS)
    await harness.request("POST", "/pause")
    metrics = (await harness.get("/metrics")).body.decode()
    assert 'http_requests_total{handler="/pause",method="POST",status="2xx"} 1' in metrics
