"""`tokring bench frontend`: what it measures is what it says; every contender runs once."""

import io
import json
import os
import socket
import threading
import time
from typing import Any, cast

import pytest

pytest.importorskip("fastapi", reason="the extra [bench] is not installed")

from rich.console import Console  # noqa: E402

from tokring.bench import _native  # noqa: E402
from tokring.bench.frontend import figures, runs  # noqa: E402
from tokring.bench.frontend.command import measure  # noqa: E402
from tokring.bench.frontend.probes import Prober  # noqa: E402
from tokring.bench.frontend.runs import Load, Series  # noqa: E402
from tokring.bench.frontend.servers import BenchError, Server, start_floor  # noqa: E402
from tokring.bench.frontend.sizes import Sizes  # noqa: E402
from tokring.bench.frontend.slow_clients import SlowClientsOutcome  # noqa: E402


def test_the_floor_sends_one_event_per_stream_and_step() -> None:
    load = Load(3, 40, 1.0)
    with start_floor(3, 40, 250, load.step_us) as floor:
        cpu_us, event_bytes = runs.measure_streams(floor, load)
    assert event_bytes == 250 and cpu_us > 0


def test_a_reader_notes_the_time_between_two_events_of_a_stream() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        reader = _native.StreamReader(listening.getsockname()[1], [b"GET / HTTP/1.1\r\n\r\n"])
        server, _ = listening.accept()
        with server:
            server.sendall(b"data: 1\n\n")
            assert reader.read_until(1, 60) and reader.take_gaps_us() == []
            time.sleep(0.01)
            server.sendall(b"data: 2\n\ndata: 3\n\n")
            assert reader.read_until(3, 60)
    gaps = reader.take_gaps_us()
    assert len(gaps) == 2 and gaps[0] >= 10_000 and reader.take_gaps_us() == []


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
        )
    ]
    results = figures.stream_ratios(series) + figures.logprob_ratios(series)
    values = {result.name: result.value for result in results}
    assert values["vs_send_floor"] == 1.5 and values["vs_fastapi"] == 10 and values["logprobs_vs_pydantic"] == 25
    assert values["stops_overhead"] == pytest.approx(1.05)
    assert all(result.met is not False for result in results)


def test_the_readers_ratio_is_the_median_over_pairs() -> None:
    outcome = SlowClientsOutcome(alone_p99_us=[10, 10, 100], beside_p99_us=[30, 12, 110], extra_mib=3, freed_s=0.1)
    [itl, *others] = figures.slow_client_ratios(outcome)
    assert itl.value == pytest.approx(1.2) and itl.met and all(other.met for other in others)
    outcome.beside_p99_us = [30, 16, 160]
    assert figures.slow_client_ratios(outcome)[0].met is False


def test_latencies_have_a_p99() -> None:
    series = Series("tokring", "GET /health, latency", 256, [float(value) for value in range(1, 201)], is_latency=True)
    assert series.row["p50_us"] == 100.5 and series.row["p99_us"] == 198
    assert "p99_us" not in Series("tokring", "plain", 1, [1.0]).row


def test_a_prober_insists_on_the_status_that_is_expected() -> None:
    def answer(client: socket.socket) -> None:
        with client:
            while client.recv(1000):
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
                client.sendall(b"k")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server("any", cast(Any, None), listening.getsockname()[1], os.getpid())
        for status in (200, 503):
            with Prober(server, "/health", status) as prober:
                thread = threading.Thread(target=answer, args=[listening.accept()[0]])
                thread.start()
                if status == 200:
                    assert prober.ask() > 0 and prober.cpu_us(3) > 0
                else:
                    with pytest.raises(BenchError, match="200 OK"):
                        prober.ask()
            thread.join()


def test_a_whole_run_measures_every_contender() -> None:
    sizes = Sizes(loads=(Load(4, 40, 5.0),), repetitions=1, num_probes=10, num_pairs=1, itl_tokens=20)
    outcome = measure(Console(file=io.StringIO()), sizes, ("streams", "logprobs"))
    assert set(outcome["ratios"]) >= {"vs_send_floor", "vs_fastapi", "stops_overhead", "logprobs_vs_pydantic"}
    assert {row["transport"] for row in outcome["rows"]} == {"tokring", "send", "fastapi", "aiohttp", "pydantic"}
    assert outcome["ratios"]["logprobs_vs_pydantic"] > 1
    json.dumps(outcome)
