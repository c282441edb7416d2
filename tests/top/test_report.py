"""Rates and quantiles between two staged snapshots."""

import pytest

from tests.top.staging import histogram, ring, snapshot
from tokring.top.report import measure
from tokring.top.running_server import quantile
from tokring_ipc import Histogram


def test_rates_are_per_second_of_the_interval() -> None:
    before = snapshot(0.0, steps=100, step_execute_ns=0, generation_tokens=5)
    after = snapshot(2.0, steps=300, step_execute_ns=1_500_000_000, generation_tokens=9)
    report = measure(before, after)
    assert report.engine.steps_per_s == 100
    assert report.engine.step_ms == pytest.approx(7.5)
    assert report.engine.busy_percent == pytest.approx(75)
    assert report.tokens.generated == 9


def test_tokens_per_second_count_first_and_later_outputs() -> None:
    before = snapshot(0.0, histograms={"time_to_first_token_seconds": histogram(2)})
    after = snapshot(
        0.5,
        histograms={"time_to_first_token_seconds": histogram(4), "inter_token_latency_seconds": histogram(98)},
    )
    report = measure(before, after)
    assert report.tokens.per_s == 200
    assert report.tokens.total == 102


def test_a_process_that_was_not_there_before_counts_from_its_start() -> None:
    report = measure(snapshot(0.0, cpu_s=None), snapshot(1.0, cpu_s=0.25))
    assert [process.cpu_percent for process in report.processes] == pytest.approx([25, 25])


def test_an_engine_that_started_anew_gives_no_negative_rates() -> None:
    report = measure(snapshot(0.0, steps=500, rings=(ring(frames=9),)), snapshot(1.0, steps=3, rings=(ring(frames=2),)))
    assert report.engine.steps_per_s == 0
    assert report.rings[0].frames_per_s == 0


def test_a_step_longer_than_the_interval_counts_as_busy() -> None:
    report = measure(snapshot(0.0), snapshot(1.0, step_age_s=30.0))
    assert report.engine.busy_percent == 100
    assert report.engine.step_ms is None


def test_ring_fill_and_hops_come_from_the_interval() -> None:
    before = ring(hops=(1000, 0, 0))
    after = ring(hops=(1000, 10, 0), used_bytes=1 << 20, capacity_bytes=4 << 20, doorbells_sent=7)
    [report] = measure(snapshot(0.0, rings=(before,)), snapshot(1.0, rings=(after,))).rings
    assert report.fill_percent == 25
    assert report.hop_p50_us == pytest.approx(150)
    assert report.doorbells_sent_per_s == 7


@pytest.mark.parametrize(("share", "value"), [(0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)])
def test_quantiles_are_interpolated_within_their_bucket(share: float, value: float) -> None:
    assert quantile(None, Histogram((1.0, 2.0), (10, 10, 0), 0.0), share) == pytest.approx(value)


def test_a_quantile_above_the_last_bound_is_the_last_bound() -> None:
    assert quantile(None, Histogram((1.0, 2.0), (0, 0, 3), 0.0), 0.5) == 2.0


def test_a_quantile_of_nothing_is_none() -> None:
    same = Histogram((1.0, 2.0), (4, 0, 3), 0.0)
    assert quantile(same, same, 0.5) is None
