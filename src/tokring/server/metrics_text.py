"""MetricsText: the lines of /metrics, prepared once; a scrape only fills in the numbers."""

import functools
import os
import resource
import time
from collections.abc import Sequence
from typing import Any

from tokring.server.histogram_text import HistogramText
from tokring.server.http_series import HANDLERS, METHODS, STATUS_CLASSES, pair_index
from tokring.server.page_template import PageTemplate, any_in_each, number_text
from tokring.server.server_pages import ServerPages
from tokring_ipc.stats import STAT_INDEX, STATS_TABLE, WORD_INDEX, RingStats, read_rings, read_sums

_ENGINE_GAUGES = (
    ("vllm:num_requests_running", "num_requests_running", "Requests in the running batch."),
    ("vllm:num_requests_waiting", "num_requests_waiting", "Requests that wait, whatever for."),
)
_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("vllm:gpu_prefix_cache_queries", "prefix_cache_queries", "Older name of vllm:prefix_cache_queries."),
    ("vllm:gpu_prefix_cache_hits", "prefix_cache_hits", "Older name of vllm:prefix_cache_hits."),
    ("vllm:num_preemptions", "num_preemptions", "Requests preempted by the scheduler."),
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of finished requests."),
    ("vllm:prompt_tokens_cached", "prompt_tokens_cached", "Prompt tokens that came from the prefix cache."),
    ("vllm:generation_tokens", "generation_tokens", "Tokens generated for finished requests."),
    ("vllm:spec_decode_num_drafts", "spec_decode_num_drafts", "Drafts made by speculation."),
    ("vllm:spec_decode_num_draft_tokens", "spec_decode_num_draft_tokens", "Tokens in these drafts."),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens",
        "Draft tokens that were what the model said.",
    ),
)
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_HISTOGRAMS = (
    ("vllm:iteration_tokens_total", "iteration_tokens", "Tokens in each engine step."),
    ("vllm:time_to_first_token_seconds", "time_to_first_token_seconds", "Arrival to first output."),
    ("vllm:inter_token_latency_seconds", "inter_token_latency_seconds", "Between two outputs of a request."),
    ("vllm:request_time_per_output_token_seconds", "request_time_per_output_token_seconds", "Decode time per token."),
    ("vllm:e2e_request_latency_seconds", "e2e_request_latency_seconds", "Arrival to end."),
    ("vllm:request_queue_time_seconds", "request_queue_time_seconds", "Arrival to scheduling."),
    ("vllm:request_prefill_time_seconds", "request_prefill_time_seconds", "Scheduling to first token."),
    ("vllm:request_decode_time_seconds", "request_decode_time_seconds", "First token to end."),
    ("vllm:request_inference_time_seconds", "request_inference_time_seconds", "Scheduling to end."),
    ("vllm:request_prompt_tokens", "request_prompt_tokens", "Prompt tokens per request."),
    ("vllm:request_generation_tokens", "request_generation_tokens", "Generated tokens per request."),
    (
        "vllm:request_max_num_generation_tokens",
        "request_max_num_generation_tokens",
        "Generated tokens of a request's longest choice.",
    ),
    ("vllm:request_params_max_tokens", "request_params_max_tokens", "max_tokens per request."),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "request_prefill_kv_computed_tokens",
        "Prompt tokens per request that were computed, not cached.",
    ),
    ("vllm:request_params_n", "request_params_n", "n per request."),
)
_DTYPE_NAMES = {"bf16": "bfloat16"}
_REJECTIONS = (
    "loading",
    "overloaded",
    "ring_full",
    "engine_down",
    "draining",
    "paused",
    "too_large",
    "invalid",
)
_STEP_PHASES = ("receive", "schedule", "execute", "sample", "publish")
_OWN_COUNTERS = (
    ("engine_restarts", "Engine processes started anew."),
    ("frontend_restarts", "Front-end processes started anew."),
    ("hung_processes", "Processes killed because they hung."),
    ("reloads", "Times that all front ends were replaced."),
    ("reloads_failed", "Times that they should have been, but new ones did not start."),
    ("requests_resumed", "Requests continued after an engine restart."),
    ("surplus_tokens", "Tokens computed after a stop string had matched."),
)
_RING_METRICS = (
    ("tokring:ring_used_bytes", "gauge", "used_bytes"),
    ("tokring:ring_capacity_bytes", "gauge", "capacity_bytes"),
    ("tokring:ring_full_total", "counter", "full"),
    ("tokring:ring_frames_total", "counter", "frames"),
    ("tokring:ring_records_total", "counter", "records"),
)


class MetricsText:
    """For one model name and context length (which bounds the buckets of token counts); see --kv-cache-dtype."""

    def __init__(self, model_name: str, max_model_len: int, kv_cache_dtype: str = "auto") -> None:
        self._kv_cache_dtype = kv_cache_dtype
        self._labels = f'model_name="{_escaped(model_name)}",engine="0"'
        self._limit = float(max_model_len or 1 << 62)
        self._templates: dict[bytes, PageTemplate] = {}  # one, by what http_* series there are
        self._rings: dict[tuple[str, ...], str] = {}  # the template of the rings' lines, by their labels
        self._hops: dict[str, HistogramText] = {}  # by labels

    def render(self, pages: ServerPages) -> bytes:
        """The whole answer of a scrape."""
        words = read_sums(pages.all).words
        requests, durations = any_in_each(words, "http_requests"), any_in_each(words, "http_request_duration_seconds")
        seen = requests.tobytes() + durations.tobytes()
        template = self._templates.get(seen)
        if template is None:  # a kind of request was seen for the first time
            self._templates.clear()
            template = self._templates[seen] = self._template(requests.tolist(), durations.tolist())
        total = words[WORD_INDEX["kv_blocks_total"]]
        late = {
            "kv_usage": number_text(int(words[WORD_INDEX["kv_blocks_used"]]) / int(total) if total else 0.0),
            "cache_config": "".join(_cache_config(page, self._kv_cache_dtype) for page in pages.engines),
            "heartbeats": _heartbeats(pages),
            "rings": self._ring_lines(read_rings([*pages.front_ends_in_use, *pages.engines])),
            "process": _process_lines(),
        }
        return template.render(words, late).encode()

    def _template(self, seen_requests: Sequence[bool], seen_durations: Sequence[bool]) -> PageTemplate:
        """All lines; those of http_* for what was seen, so that there are not hundreds of zeros."""
        page = PageTemplate()
        self._add_gauges(page)
        self._add_counters(page)
        for name, stat, text in _HISTOGRAMS:
            page.head(name, "histogram", text)
            page.histogram(name, stat, self._labels, limit=self._limit if _is_in_tokens(stat) else None)
        _add_http(page, seen_requests, seen_durations)
        self._add_own(page)
        page.late_lines("rings")
        page.late_lines("process")
        return page

    def _add_gauges(self, page: PageTemplate) -> None:
        labels = self._labels
        for name, stat, text in _ENGINE_GAUGES:
            page.head(name, "gauge", text)
            page.count(f"{name}{{{labels}}}", stat)
        name = "vllm:num_requests_waiting_by_reason"
        page.head(name, "gauge", "Waiting requests by what they wait for.")
        for reason in ("capacity", "deferred"):
            page.count(f'{name}{{{labels},reason="{reason}"}}', f"num_requests_waiting_{reason}")
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            page.head(name, "gauge", "Used share of the KV blocks, 0 to 1.")
            page.late(f"{name}{{{labels}}}", "kv_usage")
        page.head("vllm:cache_config_info", "gauge", "The KV cache's configuration.")
        page.late_lines("cache_config")

    def _add_counters(self, page: PageTemplate) -> None:
        labels = self._labels
        for name, stat, text in _COUNTERS:
            page.head(f"{name}_total", "counter", text)
            page.count(f"{name}_total{{{labels}}}", stat)
        stat = "spec_decode_num_accepted_tokens_per_pos"
        page.head(f"vllm:{stat}_total", "counter", "Accepted draft tokens by their place in the draft.")
        for position in range(STATS_TABLE[STAT_INDEX[stat]].instances):
            page.count(f'vllm:{stat}_total{{{labels},position="{position}"}}', stat, position)
        page.head("vllm:request_success_total", "counter", "Finished requests by reason.")
        for reason in _FINISH_REASONS:
            series = f'vllm:request_success_total{{{labels},finished_reason="{reason}"}}'
            page.count(series, f"request_success_{reason}")

    def _add_own(self, page: PageTemplate) -> None:
        name = "tokring:engine_step_seconds"
        page.head(name, "histogram", "Time of each phase of an engine step.")
        for index, phase in enumerate(_STEP_PHASES):
            page.histogram(name, "engine_step_seconds", f'{self._labels},phase="{phase}"', index)
        name = "tokring:event_loop_lag_seconds"
        page.head(name, "histogram", "How late a front end's event loop is.")
        page.histogram(name, "event_loop_lag_seconds", "")
        page.head("tokring:engine_heartbeat_age_seconds", "gauge", "Time since the engine's last heartbeat.")
        page.late_lines("heartbeats")
        page.head("tokring:paused", "gauge", "Whether the engine is told to compute nothing.")
        page.count("tokring:paused", "paused")
        for stat, text in _OWN_COUNTERS:
            page.head(f"tokring:{stat}_total", "counter", text)
            page.count(f"tokring:{stat}_total", stat)
        page.head("tokring:requests_rejected_total", "counter", "Requests refused, by reason.")
        for reason in _REJECTIONS:
            page.count(f'tokring:requests_rejected_total{{reason="{reason}"}}', f"rejected_{reason}")

    def _ring_lines(self, rings: Sequence[RingStats]) -> str:
        labels = tuple(f'frontend="{ring.frontend}",engine="{ring.engine}",ring="{ring.ring}"' for ring in rings)
        template = self._rings.get(labels)
        if template is None:
            template = self._rings[labels] = _ring_template(labels)
        values: list[int] = []
        for _, _, field in _RING_METRICS:
            values += [getattr(ring, field) for ring in rings]
        for ring in rings:
            values += (ring.doorbells_sent, ring.doorbells_suppressed)
        return template % tuple(values) + "".join(map(self._hop_lines, labels, rings))

    def _hop_lines(self, labels: str, ring: RingStats) -> str:
        hop = self._hops.get(labels)
        if hop is None:
            hop = self._hops[labels] = HistogramText("tokring:ring_hop_seconds", labels, ring.hop.bounds)
        return hop.render((int(ring.hop.sum * 1e9), *ring.hop.buckets), 1e9)


def _add_http(page: PageTemplate, seen_requests: Sequence[bool], seen_durations: Sequence[bool]) -> None:
    pairs = [
        (pair_index(handler, method), f'handler="{name}",method="{method_name}"')
        for handler, name in enumerate(HANDLERS)
        for method, method_name in enumerate(METHODS)
    ]
    page.head("http_requests_total", "counter", "HTTP requests, probes left out.")
    for pair, labels in pairs:
        for status, text in enumerate(STATUS_CLASSES):
            instance = pair * len(STATUS_CLASSES) + status
            if seen_requests[instance]:
                page.count(f'http_requests_total{{{labels},status="{text}"}}', "http_requests", instance)
    name = "http_request_duration_seconds"
    page.head(name, "histogram", "Duration by handler and method.")
    for pair, labels in pairs:
        if seen_durations[pair]:
            page.histogram(name, name, labels, pair)
    name = "http_request_duration_highr_seconds"
    page.head(name, "histogram", "Duration of all requests.")
    page.histogram(name, name, "")


def _ring_template(labels: Sequence[str]) -> str:
    """Lines with places for the numbers of each of _RING_METRICS, ring by ring, then of the doorbells."""
    lines: list[str] = []
    for name, kind, field in _RING_METRICS:
        lines.append(_head(name, kind, f"{field.replace('_', ' ').capitalize()} of a ring."))
        lines += [f"{name}{{{label}}} %d" for label in labels]
    lines.append(_head("tokring:doorbells_total", "counter", "Publishes that rang the doorbell, or need not."))
    for label in labels:
        lines += [f'tokring:doorbells_total{{{label},result="{result}"}} %d' for result in ("sent", "suppressed")]
    lines.append(_head("tokring:ring_hop_seconds", "histogram", "Commit of a frame to its reader taking it."))
    return "\n".join(lines) + "\n"


def _heartbeats(pages: ServerPages) -> str:
    return "".join(
        f'tokring:engine_heartbeat_age_seconds{{engine="{page.index}"}} {number_text(watch.silence_s)}\n'
        for page, watch in zip(pages.engines, pages.engine_watches, strict=True)
    )


def _cache_config(page: Any, kv_cache_dtype: str) -> str:
    caching = "True" if page.get("enable_prefix_caching") else "False"
    dtype = _DTYPE_NAMES.get(kv_cache_dtype, kv_cache_dtype)
    if dtype == "auto":  # that of the activations
        dtype = {2: "bfloat16", 4: "float32"}.get(page.get("cache_dtype_bytes"), dtype)
    labels = (
        f'engine="{page.index}",block_size="{page.get("block_size")}",num_gpu_blocks="{page.get("kv_blocks_total")}",'
        f'cache_dtype="{dtype}",enable_prefix_caching="{caching}"'
    )
    return f"vllm:cache_config_info{{{labels}}} 1\n"


def _process_lines() -> str:
    """prometheus_client's process_* of the process that answers."""
    virtual, resident = map(int, os.pread(_statm(), 64, 0).split()[:2])
    return _PROCESS_TEMPLATE % (
        number_text(time.process_time()),
        resident * _PAGE_BYTES,
        virtual * _PAGE_BYTES,
        number_text(_START_TIME),
        _num_open_fds(),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


@functools.cache
def _statm() -> int:
    """Open for good: it is read at every scrape."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _num_open_fds() -> int:
    # Linux 6.2 tells their number without listing them: with hundreds of streams the list costs more than all the rest.
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))


_START_TIME = time.time()
_PAGE_BYTES = resource.getpagesize()


def _is_in_tokens(stat: str) -> bool:
    return stat.startswith("request_") and stat.endswith("_tokens")


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}"


_PROCESS_TEMPLATE = "".join(
    _head(name, kind, "Of the front end that answers.") + f"\n{name} %s\n"
    for name, kind in (
        ("process_cpu_seconds_total", "counter"),
        ("process_resident_memory_bytes", "gauge"),
        ("process_virtual_memory_bytes", "gauge"),
        ("process_start_time_seconds", "gauge"),
        ("process_open_fds", "gauge"),
        ("process_max_fds", "gauge"),
    )
)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
