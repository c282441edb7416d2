"""MetricsText: the lines of /metrics, prepared once; a scrape only fills in the numbers."""

import os
import resource
import time
from collections.abc import Sequence
from typing import Any

from tokring.server.histogram_text import HistogramText, number_text
from tokring.server.http_series import HANDLERS, METHODS, STATUS_CLASSES, pair_index, series_index
from tokring.server.server_pages import ServerPages
from tokring_ipc.stats import STAT_INDEX, STATS_TABLE, RingStats, read_rings, read_sums

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
)
_SPECULATION = (
    ("spec_decode_num_drafts", "Drafts made by speculation."),
    ("spec_decode_num_draft_tokens", "Tokens in these drafts."),
    ("spec_decode_num_accepted_tokens", "Draft tokens that were what the model said."),
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
_RING_METRICS = (
    ("tokring:ring_used_bytes", "gauge", "used_bytes"),
    ("tokring:ring_capacity_bytes", "gauge", "capacity_bytes"),
    ("tokring:ring_full_total", "counter", "full"),
    ("tokring:ring_frames_total", "counter", "frames"),
    ("tokring:ring_records_total", "counter", "records"),
)


class _Histogram:
    """One histogram of the stats page."""

    def __init__(self, name: str, stat: str, labels: str, instance: int = 0, limit: float | None = None) -> None:
        row = STATS_TABLE[STAT_INDEX[stat]]
        self._words = slice(row.first_word + instance * row.words, row.first_word + (instance + 1) * row.words)
        self._scale = row.scale
        self._text = HistogramText(name, labels, [bound for bound in row.bounds if limit is None or bound <= limit])

    def text(self, words: Sequence[int]) -> str:
        return self._text.render(words[self._words], self._scale)

    def is_empty(self, words: Sequence[int]) -> bool:
        return not any(words[self._words])


class MetricsText:
    """For one model name and context length (which bounds the buckets of token counts)."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self._labels = f'model_name="{_escaped(model_name)}",engine="0"'
        limit = float(max_model_len or 1 << 62)
        self._histograms = [
            (
                _head(name, "histogram", text),
                _Histogram(name, stat, self._labels, 0, limit if _is_in_tokens(stat) else None),
            )
            for name, stat, text in _HISTOGRAMS
        ]
        self._steps = [
            _Histogram("tokring:engine_step_seconds", "engine_step_seconds", f'{self._labels},phase="{phase}"', index)
            for index, phase in enumerate(_STEP_PHASES)
        ]
        self._lag = _Histogram("tokring:event_loop_lag_seconds", "event_loop_lag_seconds", "")
        self._highr = _Histogram("http_request_duration_highr_seconds", "http_request_duration_highr_seconds", "")
        self._hops: dict[str, HistogramText] = {}  # by labels
        self._durations = {
            (handler, method): _Histogram(
                "http_request_duration_seconds",
                "http_request_duration_seconds",
                f'handler="{name}",method="{METHODS[method]}"',
                pair_index(handler, method),
            )
            for handler, name in enumerate(HANDLERS)
            for method in range(len(METHODS))
        }

    def render(self, pages: ServerPages) -> bytes:
        """The whole answer of a scrape."""
        sums = read_sums(pages.all)
        words: list[int] = sums._words.tolist()
        lines: list[str] = []
        self._add_gauges(lines, words, pages)
        self._add_counters(lines, words)
        for head, histogram in self._histograms:
            lines += [head, histogram.text(words)]
        self._add_http(lines, words)
        self._add_own(lines, words, pages)
        lines.extend(_process_lines())
        lines.append("")
        return "\n".join(lines).encode()

    def _add_gauges(self, lines: list[str], words: Sequence[int], pages: ServerPages) -> None:
        labels = self._labels
        for name, stat, text in _ENGINE_GAUGES:
            lines += [_head(name, "gauge", text), f"{name}{{{labels}}} {_word(words, stat)}"]
        name = "vllm:num_requests_waiting_by_reason"
        lines.append(_head(name, "gauge", "Waiting requests by what they wait for."))
        for reason in ("capacity", "deferred"):
            lines.append(f'{name}{{{labels},reason="{reason}"}} {_word(words, f"num_requests_waiting_{reason}")}')
        total = _word(words, "kv_blocks_total")
        usage = _word(words, "kv_blocks_used") / total if total else 0.0
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            lines += [
                _head(name, "gauge", "Used share of the KV blocks, 0 to 1."),
                f"{name}{{{labels}}} {number_text(usage)}",
            ]
        lines.append(_head("vllm:cache_config_info", "gauge", "The KV cache's configuration."))
        lines += [_cache_config(page) for page in pages.engines]

    def _add_speculation(self, lines: list[str], words: Sequence[int]) -> None:
        """Only where something was drafted: nothing else in the page tells whether speculation is on."""
        for name, text in _SPECULATION:
            lines += [
                _head(f"vllm:{name}_total", "counter", text),
                f"vllm:{name}_total{{{self._labels}}} {_word(words, name)}",
            ]
        stat = "spec_decode_num_accepted_tokens_per_pos"
        lines.append(_head(f"vllm:{stat}_total", "counter", "Accepted draft tokens by their place in the draft."))
        row = STATS_TABLE[STAT_INDEX[stat]]
        for position in range(row.instances):
            value = words[row.first_word + position]
            lines.append(f'vllm:{stat}_total{{{self._labels},position="{position}"}} {value}')

    def _add_counters(self, lines: list[str], words: Sequence[int]) -> None:
        labels = self._labels
        for name, stat, text in _COUNTERS:
            lines += [_head(f"{name}_total", "counter", text), f"{name}_total{{{labels}}} {_word(words, stat)}"]
        if _word(words, "spec_decode_num_drafts"):
            self._add_speculation(lines, words)
        lines.append(_head("vllm:request_success_total", "counter", "Finished requests by reason."))
        for reason in _FINISH_REASONS:
            value = _word(words, f"request_success_{reason}")
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {value}')

    def _add_http(self, lines: list[str], words: Sequence[int]) -> None:
        lines.append(_head("http_requests_total", "counter", "HTTP requests, probes left out."))
        first = STATS_TABLE[STAT_INDEX["http_requests"]].first_word
        seen = [pair for pair, histogram in self._durations.items() if not histogram.is_empty(words)]
        for handler, method in seen:
            for status, text in enumerate(STATUS_CLASSES):
                value = words[first + series_index(handler, method, status)]
                if value:
                    labels = f'handler="{HANDLERS[handler]}",method="{METHODS[method]}",status="{text}"'
                    lines.append(f"http_requests_total{{{labels}}} {value}")
        lines.append(_head("http_request_duration_seconds", "histogram", "Duration by handler and method."))
        lines += [self._durations[pair].text(words) for pair in seen]
        lines.append(_head("http_request_duration_highr_seconds", "histogram", "Duration of all requests."))
        lines.append(self._highr.text(words))

    def _add_own(self, lines: list[str], words: Sequence[int], pages: ServerPages) -> None:
        lines.append(_head("tokring:engine_step_seconds", "histogram", "Time of each phase of an engine step."))
        lines += [histogram.text(words) for histogram in self._steps]
        lines.append(_head("tokring:event_loop_lag_seconds", "histogram", "How late a front end's event loop is."))
        lines.append(self._lag.text(words))
        lines.append(_head("tokring:engine_heartbeat_age_seconds", "gauge", "Time since the engine's last heartbeat."))
        for page, watch in zip(pages.engines, pages.engine_watches, strict=True):
            lines.append(
                f'tokring:engine_heartbeat_age_seconds{{engine="{page.index}"}} {number_text(watch.silence_s)}'
            )
        for stat, text in (
            ("engine_restarts", "Engine processes started anew."),
            ("frontend_restarts", "Front-end processes started anew."),
            ("hung_processes", "Processes killed because they hung."),
            ("reloads", "Times that all front ends were replaced."),
            ("reloads_failed", "Times that they should have been, but new ones did not start."),
            ("requests_resumed", "Requests continued after an engine restart."),
            ("surplus_tokens", "Tokens computed after a stop string had matched."),
        ):
            name = f"tokring:{stat}_total"
            lines += [_head(name, "counter", text), f"{name} {_word(words, stat)}"]
        lines.append(_head("tokring:requests_rejected_total", "counter", "Requests refused, by reason."))
        for reason in _REJECTIONS:
            lines.append(f'tokring:requests_rejected_total{{reason="{reason}"}} {_word(words, f"rejected_{reason}")}')
        self._add_rings(lines, read_rings([*pages.front_ends_in_use, *pages.engines]))

    def _add_rings(self, lines: list[str], rings: Sequence[RingStats]) -> None:
        labels = [f'frontend="{ring.frontend}",engine="{ring.engine}",ring="{ring.ring}"' for ring in rings]
        for name, kind, field in _RING_METRICS:
            lines.append(_head(name, kind, f"{field.replace('_', ' ').capitalize()} of a ring."))
            lines += [f"{name}{{{label}}} {getattr(ring, field)}" for label, ring in zip(labels, rings, strict=True)]
        lines.append(_head("tokring:doorbells_total", "counter", "Publishes that rang the doorbell, or need not."))
        for label, ring in zip(labels, rings, strict=True):
            lines.append(f'tokring:doorbells_total{{{label},result="sent"}} {ring.doorbells_sent}')
            lines.append(f'tokring:doorbells_total{{{label},result="suppressed"}} {ring.doorbells_suppressed}')
        lines.append(_head("tokring:ring_hop_seconds", "histogram", "Commit of a frame to its reader taking it."))
        for label, ring in zip(labels, rings, strict=True):
            hop = self._hops.get(label)
            if hop is None:
                hop = self._hops[label] = HistogramText("tokring:ring_hop_seconds", label, ring.hop.bounds)
            lines.append(hop.render((int(ring.hop.sum * 1e9), *ring.hop.buckets), 1e9))


def _cache_config(page: Any) -> str:
    caching = "True" if page.get("enable_prefix_caching") else "False"
    dtype = {2: "bfloat16", 4: "float32", 1: "int8"}.get(page.get("cache_dtype_bytes"), "auto")
    labels = (
        f'engine="{page.index}",block_size="{page.get("block_size")}",num_gpu_blocks="{page.get("kv_blocks_total")}",'
        f'cache_dtype="{dtype}",enable_prefix_caching="{caching}"'
    )
    return f"vllm:cache_config_info{{{labels}}} 1"


def _process_lines() -> list[str]:
    """prometheus_client's process_* of the process that answers."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/statm", encoding="ascii") as file:
        virtual, resident = (int(pages) * resource.getpagesize() for pages in file.read().split()[:2])
    values = (
        ("process_cpu_seconds_total", "counter", usage.ru_utime + usage.ru_stime),
        ("process_resident_memory_bytes", "gauge", resident),
        ("process_virtual_memory_bytes", "gauge", virtual),
        ("process_start_time_seconds", "gauge", _START_TIME),
        ("process_open_fds", "gauge", len(os.listdir("/proc/self/fd"))),
        ("process_max_fds", "gauge", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    )
    lines: list[str] = []
    for name, kind, value in values:
        lines += [_head(name, kind, "Of the front end that answers."), f"{name} {number_text(value)}"]
    return lines


_START_TIME = time.time()


def _word(words: Sequence[int], stat: str) -> int:
    return words[STATS_TABLE[STAT_INDEX[stat]].first_word]


def _is_in_tokens(stat: str) -> bool:
    return stat.startswith("request_") and stat.endswith("_tokens")


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
