"""StepStats: what every step tells the stats page."""

from __future__ import annotations

from time import monotonic_ns
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokring.engine.engine_config import EngineConfig
from tokring.engine.scheduler import Scheduler
from tokring_ipc import StepPhase


class Page(Protocol):
    """The part of tokring_ipc.StatsPage that a step uses."""

    def add(self, stat: str | int, amount: int = 1, instance: int = 0) -> None: ...
    def set(self, stat: str | int, value: int, instance: int = 0) -> None: ...
    def observe(self, stat: str | int, value: float, instance: int = 0) -> None: ...


class StepStats:
    """Times the phases of a step and mirrors the scheduler's state; without a page it only keeps the times."""

    def __init__(self, page: Page | None = None) -> None:
        self.phase_ns = [0] * _NUM_PHASES  # of the last step
        self._page = page
        self._mark_ns = 0
        self._mirrored = {"num_preemptions": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0, "surplus_tokens": 0}

    def describe(self, config: EngineConfig, bytes_per_block: int) -> None:
        """Write what does not change after the start."""
        if self._page is None:
            return
        for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "vocab_size"):
            self._page.set(name, getattr(config, name))
        self._page.set("enable_prefix_caching", int(config.enable_prefix_caching))
        self._page.set("kv_blocks_total", config.num_blocks)
        self._page.set("kv_cache_bytes", config.num_blocks * bytes_per_block)

    def begin(self) -> int:
        """Start a step; return its time in ns of CLOCK_MONOTONIC."""
        self._mark_ns = now_ns = monotonic_ns()
        self.phase_ns = [0] * _NUM_PHASES
        if self._page is not None:
            self._page.set("step_started_ns", now_ns)
        return now_ns

    def end_phase(self, phase: int) -> None:
        """Attribute the time since the last mark to `phase`, a StepPhase."""
        now_ns = monotonic_ns()
        self.phase_ns[phase] += now_ns - self._mark_ns
        self._mark_ns = now_ns

    def end_step(self, num_tokens: int, scheduler: Scheduler) -> None:
        """Record a step that computed num_tokens; 0: it was launched, and recorded, before."""
        page = self._page
        if page is None:
            return
        if num_tokens:
            page.add("steps")
            page.observe("iteration_tokens", num_tokens)
        for phase, stat in _PHASE_COUNTERS:
            page.add(stat, self.phase_ns[phase])
            page.observe("engine_step_seconds", self.phase_ns[phase] * 1e-9, phase)
        self._mirror(page, scheduler)

    def speculated(self, num_drafts: NDArray[np.int32], num_accepted: NDArray[np.int32]) -> None:
        """Count a step's drafts: how many each row had, and how many of them were right."""
        if self._page is None:
            return
        self._page.add("spec_decode_num_drafts", int(np.count_nonzero(num_drafts)))
        self._page.add("spec_decode_num_draft_tokens", int(num_drafts.sum()))
        self._page.add("spec_decode_num_accepted_tokens", int(num_accepted.sum()))
        for position in range(int(num_accepted.max(initial=0))):
            accepted_here = int(np.count_nonzero(num_accepted > position))
            self._page.add("spec_decode_num_accepted_tokens_per_pos", accepted_here, position)

    def end_idle(self, scheduler: Scheduler) -> None:
        """Record a look around that found nothing to compute."""
        if self._page is not None:
            self._mirror(self._page, scheduler)

    def accepted(self) -> None:
        """Count a request taken in."""
        if self._page is not None:
            self._page.add("num_requests_intake")

    def refused(self) -> None:
        """Count a request refused at intake."""
        if self._page is not None:
            self._page.add("num_requests_refused")

    def stalled(self) -> None:
        """Count a step that a front end sat out for want of ring space."""
        if self._page is not None:
            self._page.add("out_stalls")

    def aborted_by_stall(self, num_requests: int) -> None:
        """Count requests that ended because their front end did not read its ring."""
        if self._page is not None:
            self._page.add("requests_aborted_by_stall", num_requests)

    def paused(self, value: bool) -> None:
        """Note whether the engine is told to compute nothing."""
        if self._page is not None:
            self._page.set("paused", int(value))

    def _mirror(self, page: Page, scheduler: Scheduler) -> None:
        page.set("step_started_ns", 0)
        waiting = scheduler.waiting.num_waiting
        deferred = scheduler.waiting.num_deferred
        page.set("num_requests_running", scheduler.columns.num_rows)
        page.set("num_requests_waiting", waiting)
        page.set("num_requests_waiting_capacity", waiting - deferred)
        page.set("num_requests_waiting_deferred", deferred)
        page.set("kv_blocks_used", scheduler.pool.num_blocks - scheduler.pool.num_free)
        self._add_difference(page, "num_preemptions", scheduler.num_preemptions)
        self._add_difference(page, "prefix_cache_queries", scheduler.prefix_queries)
        self._add_difference(page, "prefix_cache_hits", scheduler.prefix_hits)
        self._add_difference(page, "surplus_tokens", scheduler.num_surplus)

    def _add_difference(self, page: Page, name: str, value: int) -> None:
        # The page's counters go on over restarts, the scheduler's begin at 0.
        if value != self._mirrored[name]:
            page.add(name, value - self._mirrored[name])
            self._mirrored[name] = value


_NUM_PHASES = len(StepPhase)
_PHASE_COUNTERS = tuple((phase, f"step_{phase.name.lower()}_ns") for phase in StepPhase)
