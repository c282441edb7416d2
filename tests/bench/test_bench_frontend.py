"""`tokring bench frontend`: what it measures is what it says; every contender runs once."""

import io
import json

import pytest

pytest.importorskip("fastapi", reason="the extra [bench] is not installed")

from rich.console import Console  # noqa: E402

from tokring.bench.frontend import runs  # noqa: E402
from tokring.bench.frontend.command import measure, ratios_of  # noqa: E402
from tokring.bench.frontend.runs import Load, Series  # noqa: E402
from tokring.bench.frontend.servers import start_floor  # noqa: E402


def test_the_floor_sends_one_event_per_stream_and_step() -> None:
    load = Load(3, 40, 1.0)
    with start_floor(3, 40, 250, load.step_us) as floor:
        cpu_us, event_bytes = runs.measure_streams(floor, load)
    assert event_bytes == 250 and cpu_us > 0


def test_ratios_are_of_the_largest_number_of_streams() -> None:
    series = [Series("tokring", "plain", streams, [cost]) for streams, cost in ((512, 6.0), (1, 90.0))] + [
        Series(name, variant, 512, [cost])
        for name, variant, cost in (
            ("send", "plain", 4.0),
            ("fastapi", "plain", 60.0),
            ("aiohttp", "plain", 18.0),
            ("tokring", "stops", 6.3),
            ("pydantic", "logprobs", 100.0),
            ("tokring", "logprobs", 4.0),
            ("tokring", "GET /health", 60.0),
            ("aiohttp", "GET /empty", 50.0),
            ("tokring", "GET /metrics", 500.0),
        )
    ]
    values = {result.name: result.value for result in ratios_of(series)}
    assert values["vs_send_floor"] == 1.5 and values["vs_fastapi"] == 10 and values["logprobs_vs_pydantic"] == 25
    assert values["stops_overhead"] == pytest.approx(1.05) and values["health_vs_aiohttp"] == 1.2
    assert all(result.met is not False for result in ratios_of(series))


def test_a_whole_run_measures_every_contender() -> None:
    outcome = measure(Console(file=io.StringIO()), (Load(4, 40, 5.0),), 1)
    assert set(outcome["ratios"]) >= {"vs_send_floor", "vs_fastapi", "stops_overhead", "logprobs_vs_pydantic"}
    assert {row["transport"] for row in outcome["rows"]} == {"tokring", "send", "fastapi", "aiohttp", "pydantic"}
    assert outcome["ratios"]["logprobs_vs_pydantic"] > 1
    json.dumps(outcome)
