"""FrontEndStats: what this front end counts, in its stats page."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from aiohttp import web

from tokring.sampling_params import SamplingParams
from tokring.server.errors import ApiError
from tokring.server.http_series import handler_index, method_index, pair_index, series_index, status_index
from tokring.server.token_path import Finish, Histogram, Result
from tokring_ipc import FinishReason, ProcessPhase
from tokring_ipc.stats import STAT_INDEX, STATS_TABLE, StatsPage

_REASON_COUNTERS = {
    FinishReason.STOP: "request_success_stop",
    FinishReason.LENGTH: "request_success_length",
    FinishReason.ABORT: "request_success_abort",
    FinishReason.ERROR: "request_success_error",
    FinishReason.REPETITION: "request_success_repetition",
}
_REJECTION_COUNTERS = {
    "overloaded": "rejected_overloaded",
    "ring_full": "rejected_ring_full",
    "not_ready": "rejected_loading",
    "draining": "rejected_draining",
    "engine_dead": "rejected_engine_down",
    "request_too_large": "rejected_too_large",
    "context_length_exceeded": "rejected_too_large",
}
_TOKEN_PATH_COUNTERS = {
    "surplus_tokens": "surplus_tokens",
    "sent_bytes": "bytes_sent",
    "sends": "sends",
    "blocked": "sends_blocked",
}
_PROCESS_PHASES = {
    "starting": ProcessPhase.STARTING,
    "ready": ProcessPhase.READY,
    "draining": ProcessPhase.DRAINING,
    "engine is dead": ProcessPhase.FAILED,
}


class FrontEndStats(Protocol):
    """Where the front end's events are counted."""

    def phase(self, phase: Any) -> None: ...
    def rejected(self, error: ApiError) -> None: ...
    def http_request(self, request: web.Request, status: int, duration_ns: int) -> None: ...
    def request_finished(
        self,
        params: SamplingParams,
        arrival_ns: int,
        result: Result,
        *,
        is_abort: bool,
        is_first_choice: bool,
        longest_choice: int | None,
    ) -> None: ...
    def tick(self, lag_ns: int, open_streams: int, open_connections: int) -> None: ...
    def token_path(self, counters: Mapping[str, int]) -> None: ...
    def connection_lost(self, *, is_slow: bool) -> None: ...
    def histogram(self, name: str) -> Histogram | None: ...
    def count_channel(self, channel: Any, engine: int) -> None: ...
    def resumed(self, num_requests: int) -> None: ...
    def close(self) -> None: ...


class NoStats:
    """Counts nothing: for tests and tools."""

    def phase(self, phase: Any) -> None:
        pass

    def rejected(self, error: ApiError) -> None:
        pass

    def http_request(self, request: web.Request, status: int, duration_ns: int) -> None:
        pass

    def request_finished(
        self,
        params: SamplingParams,
        arrival_ns: int,
        result: Result,
        *,
        is_abort: bool,
        is_first_choice: bool,
        longest_choice: int | None,
    ) -> None:
        pass

    def tick(self, lag_ns: int, open_streams: int, open_connections: int) -> None:
        pass

    def token_path(self, counters: Mapping[str, int]) -> None:
        pass

    def connection_lost(self, *, is_slow: bool) -> None:
        pass

    def histogram(self, name: str) -> Histogram | None:
        return None

    def count_channel(self, channel: Any, engine: int) -> None:
        pass

    def resumed(self, num_requests: int) -> None:
        pass

    def close(self) -> None:
        pass


class PageStats:
    """Counts in a stats page that this process writes alone."""

    def __init__(self, page: StatsPage) -> None:
        self._page = page
        self._token_path_counters: dict[str, int] = {}
        page.set("process_start_ns", time.time_ns())

    def phase(self, phase: Any) -> None:
        self._page.set("phase", int(_PROCESS_PHASES.get(str(phase), ProcessPhase.LOADING)))

    def histogram(self, name: str) -> Histogram | None:
        """The page's words of one histogram, for the token path to count in."""
        row = STATS_TABLE[STAT_INDEX[name]]
        words = self._page.counters[row.first_word : row.first_word + row.words]
        bounds_ns = np.rint(np.asarray(row.bounds) * row.scale).astype(np.uint64)
        return Histogram(bounds_ns=bounds_ns, buckets=words[1:], sum_ns=words[:1])

    def resumed(self, num_requests: int) -> None:
        """Requests that another engine goes on with."""
        self._page.add("requests_resumed", num_requests)

    def count_channel(self, channel: Any, engine: int) -> None:
        channel.count_in(self._page, engine)

    def close(self) -> None:
        self._page.close()

    def rejected(self, error: ApiError) -> None:
        counter = _REJECTION_COUNTERS.get(error.code or "")
        if counter is None and 400 <= error.status < 500:
            counter = "rejected_invalid"
        if counter is not None:
            self._page.add(counter, 1)

    def http_request(self, request: web.Request, status: int, duration_ns: int) -> None:
        handler, method = handler_index(request), method_index(request.method)
        self._page.add("http_requests", 1, series_index(handler, method, status_index(status)))
        self._page.observe("http_request_duration_seconds", duration_ns / 1e9, pair_index(handler, method))
        self._page.observe("http_request_duration_highr_seconds", duration_ns / 1e9)

    def request_finished(
        self,
        params: SamplingParams,
        arrival_ns: int,
        result: Result,
        *,
        is_abort: bool,
        is_first_choice: bool,
        longest_choice: int | None,
    ) -> None:
        """Once per sequence, at its finish row. A stop string's own cancel is a stop, not an abort."""
        finish = result.finish
        if finish is None:
            return
        page = self._page
        reason = FinishReason(finish.reason)
        if result.stop is not None:
            reason = FinishReason.STOP
        elif is_abort:
            reason = FinishReason.ABORT
        page.add(_REASON_COUNTERS.get(reason, "request_success_error"), 1)
        page.add("prompt_tokens", finish.num_prompt_tokens)
        page.add("prompt_tokens_cached", finish.num_cached_tokens)
        page.add("generation_tokens", result.num_tokens)
        self._observe_sizes(params, finish, result)
        if is_first_choice:
            page.observe("request_params_n", params.n)
        if longest_choice is not None:
            page.observe("request_max_num_generation_tokens", longest_choice)
        self._observe_times(arrival_ns, finish, result)

    def _observe_sizes(self, params: SamplingParams, finish: Finish, result: Result) -> None:
        page = self._page
        page.observe("request_prompt_tokens", finish.num_prompt_tokens)
        page.observe("request_generation_tokens", result.num_tokens)
        page.observe("request_params_max_tokens", params.max_tokens or 0)
        page.observe("request_prefill_kv_computed_tokens", max(0, finish.num_prompt_tokens - finish.num_cached_tokens))

    def _observe_times(self, arrival_ns: int, finish: Finish, result: Result) -> None:
        page = self._page
        page.observe("e2e_request_latency_seconds", _seconds(finish.end_ns - arrival_ns))
        if not finish.scheduled_ns:
            return
        page.observe("request_queue_time_seconds", _seconds(finish.scheduled_ns - arrival_ns))
        page.observe("request_inference_time_seconds", _seconds(finish.end_ns - finish.scheduled_ns))
        if not finish.first_token_ns:
            return
        page.observe("request_prefill_time_seconds", _seconds(finish.first_token_ns - finish.scheduled_ns))
        decode_s = _seconds(finish.end_ns - finish.first_token_ns)
        page.observe("request_decode_time_seconds", decode_s)
        if result.num_tokens > 1:
            page.observe("request_time_per_output_token_seconds", decode_s / (result.num_tokens - 1))

    def tick(self, lag_ns: int, open_streams: int, open_connections: int) -> None:
        self._page.set("step_started_ns", time.monotonic_ns())  # the supervisor sees that the loop goes round
        self._page.set("event_loop_lag_ns", lag_ns)
        self._page.observe("event_loop_lag_seconds", lag_ns / 1e9)
        self._page.set("open_streams", open_streams)
        self._page.set("open_connections", open_connections)

    def token_path(self, counters: Mapping[str, int]) -> None:
        """Adds what the token path's own counters have gained since the last call."""
        for name, counter in _TOKEN_PATH_COUNTERS.items():
            self._page.add(counter, counters[name] - self._token_path_counters.get(name, 0))
        self._token_path_counters = dict(counters)
        self._page.set("stalled_connections", counters["stalled"])

    def connection_lost(self, *, is_slow: bool) -> None:
        self._page.add("slow_client_aborts" if is_slow else "disconnect_aborts")


def _seconds(duration_ns: int) -> float:
    return max(0, duration_ns) / 1e9
