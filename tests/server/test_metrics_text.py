"""The text of /metrics against the stats pages that it is made from."""

import os

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokring.launch.child import StatsPageNames
from tokring.server.http_series import pair_index, series_index
from tokring.server.metrics_text import MetricsText
from tokring.server.server_pages import ServerPages
from tokring_ipc import Heartbeat, ProcessPhase, Role, StatsPage, page_name, server_prefix
from tokring_ipc.stats import STATS_TABLE, read_sums


@pytest.fixture
def pages():
    prefix = server_prefix()
    roles = [(Role.ENGINE, 0), (Role.FRONTEND, 0), (Role.FRONTEND, 1), (Role.SUPERVISOR, 0)]
    made = [StatsPage.create(page_name(prefix, role, index), role, index) for role, index in roles]
    names = StatsPageNames(engine=[made[0].name], frontend=[made[1].name, made[2].name], supervisor=made[3].name)
    heartbeat = Heartbeat(made[3])
    yield made, ServerPages.attach(names, heartbeat)
    heartbeat.stop()
    for page in made:
        page.unlink()
        page.close()


def samples_of(text, served):
    """By name and labels without model_name, bounds as numbers: value. Every name has one family."""
    families = list(text_string_to_metric_families(text.render(served).decode()))
    assert len({family.name for family in families}) == len(families)
    return {
        (
            sample.name,
            *sorted(
                (key, float(value) if key == "le" else value)
                for key, value in sample.labels.items()
                if key != "model_name"
            ),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_counter_of_the_contract_is_there_before_anything_was_counted(pages):
    samples = samples_of(MetricsText("m", 100), pages[1])
    engine = ("engine", "0")
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert samples[f"vllm:spec_decode_num_{name}_total", engine] == 0
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", engine, ("position", "0")] == 0
    assert samples["vllm:request_success_total", engine, ("finished_reason", "repetition")] == 0
    assert samples["vllm:request_prompt_tokens_bucket", engine, ("le", 100)] == 0
    assert ("vllm:request_prompt_tokens_bucket", engine, ("le", 200)) not in samples  # no context is that long


def test_the_numbers_are_sums_over_all_pages(pages):
    made, served = pages
    random = np.random.default_rng(1)
    for page in made[:3]:
        for row in STATS_TABLE:
            if row.kind == "c" and row.instances == 1:
                page.add(row.name, int(random.integers(0, 2**40)))
            elif row.kind == "h" and row.instances == 1:
                for value in random.random(20) * 2 * row.bounds[-1]:
                    page.observe(row.name, float(value))
        page.set("phase", int(ProcessPhase.READY))
    made[1].add("http_requests", 3, series_index(1, 1, 0))
    made[2].observe("http_request_duration_seconds", 0.2, pair_index(1, 1))
    text = MetricsText('a "name" of 100 %\n', 10**9)
    samples = samples_of(text, served)
    sums = read_sums(served.all)
    engine = ("engine", "0")
    assert samples["vllm:generation_tokens_total", engine] == sums["generation_tokens"] > 0
    assert samples["tokring:surplus_tokens_total",] == sums["surplus_tokens"] > 0
    for stat in ("e2e_request_latency_seconds", "request_prompt_tokens", "iteration_tokens"):
        name = "vllm:iteration_tokens_total" if stat == "iteration_tokens" else f"vllm:{stat}"
        histogram = sums.histogram(stat)
        for bound, count in zip((*histogram.bounds, np.inf), np.cumsum(histogram.buckets), strict=True):
            assert samples[f"{name}_bucket", engine, ("le", bound)] == count, (name, bound)
        assert samples[f"{name}_sum", engine] == pytest.approx(histogram.sum)
        assert samples[f"{name}_count", engine] == histogram.count == 60
    route = (("handler", "/v1/chat/completions"), ("method", "POST"))
    assert samples["http_requests_total", *route, ("status", "2xx")] == 3
    assert samples["http_request_duration_seconds_count", *route] == 1
    made[1].add("http_requests", 1, series_index(1, 1, 2))  # a kind that was never seen before
    assert samples_of(text, served)["http_requests_total", *route, ("status", "4xx")] == 1
    rings = {key for key in samples if key[0] == "tokring:ring_frames_total"}
    assert len(rings) == 4  # two for each front end in use


def test_open_descriptors_are_counted(pages):
    samples = samples_of(MetricsText("m", 0), pages[1])
    listed = len(os.listdir("/proc/self/fd"))
    assert abs(samples["process_open_fds",] - listed) <= 2
    assert samples["process_resident_memory_bytes",] > 1 << 20


@pytest.mark.parametrize(
    ("option", "num_bytes", "shown"),
    [("auto", 2, "bfloat16"), ("auto", 0, "auto"), ("int8", 1, "int8"), ("fp8", 1, "fp8"), ("bf16", 2, "bfloat16")],
)
def test_the_caches_number_format_is_named(pages, option: str, num_bytes: int, shown: str) -> None:
    pages[0][0].set("cache_dtype_bytes", num_bytes)
    text = MetricsText("m", 100, option).render(pages[1]).decode()
    assert f'cache_dtype="{shown}"' in text
