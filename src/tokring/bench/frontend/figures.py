"""The figures that the front end is held to, by the names under which they are published."""

from __future__ import annotations

from collections.abc import Sequence

from tokring.bench.frontend.probes import BUSY_STREAMS, SCRAPES_PER_S
from tokring.bench.frontend.runs import Series
from tokring.bench.frontend.slow_clients import NUM_CLIENTS, SlowClientsOutcome
from tokring.bench.ratios import Result


def _figure(
    name: str, value: float, meaning: str, *, at_least: float | None = None, at_most: float | None = None
) -> Result:
    return Result(name, value, True, meaning, at_least, at_most)


def _medians(series: Sequence[Series]) -> dict[tuple[str, str], float]:
    """By contender and variant; of several numbers of streams the largest."""
    return {(found.contender, found.variant): found.median for found in sorted(series, key=lambda s: s.num_streams)}


def stream_ratios(series: Sequence[Series]) -> list[Result]:
    costs = _medians(series)
    ours = costs["tokring", "plain"]
    most = max(found.num_streams for found in series if found.variant == "plain")
    at = f"CPU of the server process per token, {most} streams"
    return [
        _figure("vs_send_floor", ours / costs["send", "plain"], f"{at}: ours / send(2) alone", at_most=1.6),
        _figure("vs_fastapi", costs["fastapi", "plain"] / ours, f"{at}: FastAPI + pydantic / ours", at_least=7),
        _figure("vs_aiohttp", costs["aiohttp", "plain"] / ours, f"{at}: aiohttp + queue / ours"),
        _figure(
            "stops_overhead", costs["tokring", "stops"] / ours, f"{at}: with 4 stop strings / without", at_most=1.1
        ),
    ]


def logprob_ratios(series: Sequence[Series]) -> list[Result]:
    costs = _medians(series)
    ratio = costs["pydantic", "logprobs"] / costs["tokring", "logprobs"]
    meaning = "columns to bytes, top-20 logprobs, per token: pydantic / ours"
    return [_figure("logprobs_vs_pydantic", ratio, meaning, at_least=20)]


def probe_ratios(series: Sequence[Series]) -> list[Result]:
    costs = _medians(series)
    empty, stopped = costs["aiohttp", "GET /empty"], ", engine stopped"
    by_variant = {found.variant: found for found in series}
    at = f"until the answer is there, beside {BUSY_STREAMS} streams at full speed"
    return [
        _figure(
            "health_vs_aiohttp",
            costs["tokring", "GET /health"] / empty,
            "CPU per request, idle: /health / an empty aiohttp handler",
            at_most=1.5,
        ),
        _figure(
            "health_stopped_vs_aiohttp",
            costs["tokring", f"GET /health{stopped}"] / costs["aiohttp", f"GET /empty{stopped}"],
            "the same while the engine is stopped (SIGSTOP) and /health is a 503",
            at_most=1.5,
        ),
        _figure("metrics_ms", costs["tokring", "GET /metrics"] / 1000, "CPU ms per scrape of /metrics", at_most=1),
        _figure(
            "scrape_core_percent",
            costs["tokring", f"GET /metrics, {SCRAPES_PER_S} a second"] * SCRAPES_PER_S / 1e4,
            f"% of a core that {SCRAPES_PER_S} scrapes a second take",
            at_most=2,
        ),
        *(
            _figure(f"{name}_p{percent}_ms", by_variant[f"GET /{name}, latency"].percentile(percent) / 1000, f"ms {at}")
            for name in ("health", "metrics")
            for percent in (50, 99)
        ),
    ]


def slow_client_ratios(outcome: SlowClientsOutcome) -> list[Result]:
    beside = f"{NUM_CLIENTS} readers, {NUM_CLIENTS} clients that never read"
    return [
        _figure(
            "slow_clients_itl",
            outcome.itl_ratio,
            f"p99 between two tokens at {beside} / without these; median over pairs",
            at_most=1.5,
        ),
        _figure(
            "slow_clients_mib", outcome.extra_mib, f"MiB that the front end grew by: {beside}", at_most=NUM_CLIENTS
        ),
        _figure("slow_clients_freed_s", outcome.freed_s, "seconds from their leaving until nothing runs", at_most=1),
    ]
