"""`tokring bench ipc`: every transport delivers what was sent, figures come from rows, commands do what they say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokring.bench.case import CLOSED, HOT, SATURATED, Case, Delivery, Direction, Waiting, idle
from tokring.bench.command import default_cores
from tokring.bench.compare import CompareError, load, moved_rows
from tokring.bench.pair import BenchError, Run, Setup, count_syscalls, run_pair
from tokring.bench.payload import make_payload
from tokring.bench.plan import FULL, QUICK, Item, make_plan
from tokring.bench.plot import svg_plot
from tokring.bench.ratios import FURTHER, NAMED, Side, named_ratios
from tokring.bench.suite import foreign_share, run_suite
from tokring.bench.transports import REQUEST_TRANSPORTS, STEP_TRANSPORTS, Variant, available
from tokring.cli import main

SETUP = Setup(default_cores())
STEPS, MISSING = available(STEP_TRANSPORTS)
REQUESTS, _ = available(REQUEST_TRANSPORTS)
PUBLISHED = [
    "hot_vs_memcpy", "closed_vs_doorbell", "vs_zmq_asyncio", "vs_zmq_asyncio_logprobs", "vs_zmq_asyncio_batch1",
    "saturated_vs_zmq", "vs_seqpacket", "vs_seqpacket_polling", "cpu_vs_zmq", "vs_zmq_asyncio_tuples",
    "prompt128k_vs_zmq", "paced1ms_vs_zmq", "idle_cpu_percent",
]  # fmt: skip


def name_of(variant: Variant) -> str:
    return "-".join(variant.key)


def regime_of(variant: Variant) -> Any:
    return HOT if variant.waiting == Waiting.POLLING else CLOSED


def find(variants: list[Variant], *key: str) -> Variant:
    return next(variant for variant in variants if variant.key == key)


# ---- transports: the reader of every run compares its first payload with what was sent ----


@pytest.mark.parametrize("variant", STEPS, ids=name_of)
def test_a_step_with_logprobs_arrives_as_it_was_sent(variant: Variant) -> None:
    payload = make_payload(Case(Direction.STEP, 7, 3))
    run = run_pair(variant.build(payload), regime_of(variant), 5, SETUP)
    assert (run.one_way_ns > 0).all() and len(run.one_way_ns) == 5


@pytest.mark.parametrize("variant", REQUESTS, ids=name_of)
def test_a_request_arrives_as_it_was_sent(variant: Variant) -> None:
    payload = make_payload(Case(Direction.REQUEST, 1000))
    assert len(run_pair(variant.build(payload), regime_of(variant), 5, SETUP).one_way_ns) == 5


def test_a_payload_that_arrives_changed_ends_the_run_with_an_error() -> None:
    transport = find(STEPS, "ring", "L1", "uvloop").build(make_payload(Case(Direction.STEP, 4)))
    transport.payload = make_payload(Case(Direction.STEP, 5))
    with pytest.raises(BenchError, match="not what was sent"):
        run_pair(transport, CLOSED, 3, SETUP)


def test_a_writer_that_never_waits_loses_nothing_when_the_ring_is_full() -> None:
    payload = make_payload(Case(Direction.STEP, 1024, 5))  # 64 KiB a step: the ring holds 60
    run = run_pair(find(STEPS, "ring", "L2", "uvloop").build(payload), SATURATED, 100, SETUP)
    assert len(run.one_way_ns) == 100


def disturbed(*foreign_ms: float, core_ms: float) -> list[Run]:
    return [Run(np.zeros(1, np.int64), 0, {}, {}, taken, core_ms) for taken in foreign_ms]


def test_ticks_that_cancel_out_are_no_foreign_load() -> None:
    share, doubt = foreign_share(disturbed(9.0, -8.0, -4.0, core_ms=60))
    assert share == 0
    assert 0.05 < doubt < 0.2  # 180 ms in ticks of 10: little can be said


def test_foreign_load_is_told_from_the_ticks_of_long_runs() -> None:
    share, doubt = foreign_share(disturbed(70.0, 60.0, 65.0, core_ms=600))
    assert share == pytest.approx(0.108, abs=0.001)
    assert share - doubt > 0.05


def test_a_polling_reader_costs_neither_side_a_system_call() -> None:
    payload = make_payload(Case(Direction.STEP, 64))
    counted = count_syscalls(find(STEPS, "ring", "L1", "polling").build(payload), HOT, 20, SETUP)
    if counted is None:
        pytest.skip("ptrace is not allowed here")
    assert counted == (0, 0)


def test_a_sleeping_reader_costs_the_writer_one_call_a_step() -> None:
    payload = make_payload(Case(Direction.STEP, 64))
    counted = count_syscalls(find(STEPS, "ring", "L1", "uvloop").build(payload), CLOSED, 20, SETUP)
    if counted is None:
        pytest.skip("ptrace is not allowed here")
    assert counted[0] <= 1 and counted[1] <= 3


# ---- rows, ratios ----


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    case = Case(Direction.STEP, 256)
    items = [
        Item(find(STEPS, "ring", "L1", "uvloop"), case, CLOSED, 20),
        Item(find(STEPS, "ring", "L0", "polling"), case, HOT, 100),
        Item(find(STEPS, "memcpy", "L0", "polling"), case, HOT, 100),
        Item(find(STEPS, "doorbell alone", "L0", "uvloop"), case, CLOSED, 20),
        Item(find(STEPS, "ring", "L1", "uvloop"), Case(Direction.STEP, 1), idle(0.05), 1),
    ]
    return run_suite(items, 2, SETUP)


def test_a_row_holds_medians_ranges_and_what_the_kernel_charged(rows: list[dict[str, Any]]) -> None:
    ring = rows[0]
    assert (ring["transport"], ring["delivery"], ring["waiting"], ring["regime"]) == ("ring", "L1", "uvloop", "closed")
    assert ring["batch"] == 256 and ring["bytes"] == 3136 and ring["repetitions"] == 2
    low, high = ring["p50_us_range"]
    assert 0 < low <= ring["p50_us"] <= high and ring["p50_us"] <= ring["p99_us"] <= ring["p999_us"]
    assert ring["doorbells_sent"] + ring["doorbells_suppressed"] == 1
    assert ring["reader_cpu_us"] > 0 and isinstance(ring["valid"], bool)
    json.dumps(rows)


def test_ratios_carry_the_published_names_and_come_from_rows(rows: list[dict[str, Any]]) -> None:
    found = {result.name: result.value for result in named_ratios(rows)}
    assert sorted(found) == sorted(PUBLISHED)
    ring, hot, copy, bell, idle_row = rows
    assert found["closed_vs_doorbell"] == pytest.approx(ring["p50_us"] / bell["p50_us"], rel=0.01)
    assert found["hot_vs_memcpy"] == pytest.approx(hot["p50_us"] / copy["p50_us"], rel=0.01)
    assert found["idle_cpu_percent"] == idle_row["cpu_percent"]
    assert found["vs_zmq_asyncio"] is None  # not measured


@pytest.mark.parametrize("extent", [QUICK, FULL], ids=["quick", "full"])
def test_the_plan_measures_what_every_published_ratio_needs(extent: Any) -> None:
    if MISSING:
        pytest.skip(f"without {sorted(MISSING)}")
    items, _ = make_plan(extent)
    assert len(items) == len(set(items))
    planned = {(*item.variant.key, item.regime.name, item.case.size, item.case.num_logprobs) for item in items}

    def is_planned(side: Side) -> bool:
        return (side.transport, side.delivery, side.waiting, side.regime, side.size, side.logprobs) in planned

    assert all(is_planned(ratio.over) and is_planned(ratio.under) for ratio in NAMED)
    if extent is FULL:
        assert all(is_planned(ratio.over) and is_planned(ratio.under) for ratio in FURTHER)


def test_an_object_per_request_equals_what_numpy_makes_of_the_columns() -> None:
    payload = make_payload(Case(Direction.STEP, 3, 2))
    first = payload.rows()[0]
    assert first[0] == 0 and len(first[1]) == 1 and first[2] is None and len(first[5]) == len(first[6]) == 2
    assert np.float32(first[4]) == np.float32(first[6][0])
    assert find(STEPS, "ring", "L2", "uvloop").delivery == Delivery.OBJECTS


# ---- plot and compare ----


def test_the_plot_draws_a_line_per_transport(rows: list[dict[str, Any]]) -> None:
    more = [row | {"batch": 1} for row in rows if "batch" in row]
    svg = svg_plot([*rows, *more], {"cpu": "a <fast> one", "date": "2026-11-30T00:00:00"})
    assert svg.startswith("<svg") and svg.count("<polyline") == 4 and "a &lt;fast&gt; one" in svg


def written(path: Path, rows: list[dict[str, Any]], **ratios: float) -> Path:
    path.write_text(json.dumps({"machine": {}, "rows": rows, "ratios": ratios}))
    return path


def test_compare_shows_ratios_and_only_rows_that_moved(
    tmp_path: Path, rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    slower = rows[0] | {"p50_us": 1e6, "p50_us_range": [0.99e6, 1.01e6]}
    before = written(tmp_path / "a.json", rows, vs_zmq_asyncio=10.0)
    after = written(tmp_path / "b.json", [slower, *rows[1:]], vs_zmq_asyncio=20.0)
    assert [new["p50_us"] for _, new in moved_rows(load(before), load(after))] == [1e6]
    assert main(["bench", "compare", str(before), str(after)]) == 0
    shown = capsys.readouterr().out
    assert "2.00" in shown and "1,000,000.00" in shown


def test_compare_refuses_a_file_that_is_no_benchmark_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(CompareError):
        load(tmp_path / "a.json")
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 2
    assert "not written by" in capsys.readouterr().err
