"""Requests that outlive their engine: what the next one is sent, who must run alone, who may leave meanwhile."""

import asyncio

from tests.server.harness import Answer, Harness, served
from tests.server.scripted_engine import Running, ScriptedEngine

from tokring_ipc import RequestFlag


async def submitted(harness: Harness, count: int) -> list[Running]:
    """What the engine has been sent, once that are `count` requests."""
    await harness.until(lambda: len(harness.engine.all_requests) == count)
    return harness.engine.all_requests


async def steps(harness: Harness, engine: ScriptedEngine, num_steps: int) -> None:
    """So many tokens altogether, published."""
    done = sum(request.num_done for request in engine.all_requests) + num_steps
    engine.allow(num_steps)
    await harness.until(lambda: sum(request.num_done for request in engine.all_requests) == done)


async def queue_times(harness: Harness) -> str:
    """How many the histogram has."""
    metrics = (await harness.get("/metrics")).body.decode()
    return next(line for line in metrics.split("\n") if line.startswith("vllm:request_queue_time_seconds_count"))


def same(answer: Answer, other: Answer) -> bool:
    return (answer.texts, answer.finish_reasons) == (other.texts, other.finish_reasons)


@served(restarts=True)
async def test_the_next_engine_gets_prompt_and_output_with_the_same_seed_and_limits(harness: Harness) -> None:
    fields = {"max_tokens": 12, "temperature": 0.7, "seed": 3, "stream": True, "n": 2}
    expected = await harness.complete(**fields)
    harness.engine.all_requests.clear()
    harness.engine.hold()
    answer = asyncio.ensure_future(harness.complete(**fields))
    before = list(await submitted(harness, 2))
    await steps(harness, harness.engine, 6)
    await harness.engine_dies(*before)
    assert (await harness.get("/health")).status == 503
    assert (await harness.get("/health/live")).status == 200
    engine = await harness.next_engine()
    for old, new in zip(before, await submitted(harness, 2), strict=True):
        assert new.prompt[: len(old.prompt)] == old.prompt
        assert len(new.prompt) - len(old.prompt) == new.record["num_prior_output"] == 3
        assert new.record["flags"] == old.record["flags"] | RequestFlag.RESUMED
        assert new.generation > old.generation
        for name in ("stream_slot", "seed", "choice_index", "max_tokens", "temperature", "parent_slot"):
            assert new.record[name] == old.record[name]
    before_it = await queue_times(harness)
    engine.go_on()
    assert same(await answer, expected)
    await harness.all_slots_are_free()
    # When they were scheduled, only the dead engine knew; what the next one says is no time in the queue.
    assert await queue_times(harness) == before_it


@served(restarts=True)
async def test_a_request_that_comes_between_two_engines_waits_for_the_next(harness: Harness) -> None:
    expected = await harness.complete(max_tokens=5)
    await harness.engine_dies()
    answer = asyncio.ensure_future(harness.complete(max_tokens=5))
    await harness.until(lambda: harness.client.in_flight == 1)
    (await harness.next_engine()).go_on()
    assert same(await answer, expected)


@served(restarts=True)
async def test_a_client_that_leaves_between_two_engines_is_not_sent_to_the_next(harness: Harness) -> None:
    harness.engine.hold()
    leaving = asyncio.ensure_future(harness.complete(max_tokens=5, stream=True))
    await submitted(harness, 1)
    await harness.engine_dies()
    leaving.cancel()
    await harness.all_slots_are_free()
    engine = await harness.next_engine()
    staying = asyncio.ensure_future(harness.complete("other", max_tokens=5))
    await submitted(harness, 1)
    engine.go_on()
    assert (await staying).status == 200


@served(restarts=True)
async def test_a_request_of_which_engines_die_runs_alone_and_ends_while_others_go_on(
    harness: Harness,
) -> None:
    expected = await harness.complete(max_tokens=5)
    harness.engine.all_requests.clear()
    harness.engine.hold()
    answers = []
    for index in range(2):
        answers.append(asyncio.ensure_future(harness.complete(max_tokens=5)))
        await submitted(harness, index + 1)
    await harness.engine_dies(*harness.engine.all_requests)
    await harness.next_engine()
    await harness.engine_dies(*await submitted(harness, 2))
    engine = await harness.next_engine()
    await steps(harness, engine, 1)  # of the only one it has
    innocent, suspect = await submitted(harness, 2)
    assert innocent.num_done == 1 and suspect.num_done == 0
    await harness.engine_dies(suspect)
    poison = await answers[1]
    assert (poison.status, poison.error["code"]) == (500, "poison")
    (await harness.next_engine()).go_on()
    assert same(await answers[0], expected)
    await harness.all_slots_are_free()


@served()
async def test_without_restarts_the_death_of_the_engine_ends_its_requests(harness: Harness) -> None:
    harness.engine.hold()
    answer = asyncio.ensure_future(harness.complete(max_tokens=5))
    await submitted(harness, 1)
    harness.engine.die()
    assert ((await answer).status, (await answer).error["code"]) == (503, "engine_dead")
    assert (await harness.complete(max_tokens=5)).error["code"] == "engine_dead"
