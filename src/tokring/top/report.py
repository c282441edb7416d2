"""Report: rates and shares between two snapshots of a server."""

from __future__ import annotations

from dataclasses import dataclass

from tokring.top.running_server import quantile
from tokring.top.snapshot import ProcessSnapshot, Snapshot
from tokring_ipc import RingStats

STEP_PHASES = ("receive", "schedule", "execute", "sample", "publish")


@dataclass(frozen=True, slots=True, kw_only=True)
class RingReport:
    """Rates over the interval; frames to doorbells_suppressed: since the start."""

    frontend: int
    engine: int
    ring: str  # "req" or "out"
    fill_percent: float
    used_bytes: int
    capacity_bytes: int
    frames_per_s: float
    records_per_s: float
    full_per_s: float
    doorbells_sent_per_s: float
    doorbells_suppressed_per_s: float
    hop_p50_us: float | None  # from publish to the reader's taking it; None: nothing has crossed
    hop_p99_us: float | None
    frames: int
    records: int
    full: int
    doorbells_sent: int
    doorbells_suppressed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """Percent of one core over the interval."""

    name: str
    pid: int
    phase: str
    cpu_percent: float
    main_cpu_percent: float
    main_wait_percent: float  # ready to run, but another process had the CPU
    cpu_seconds: float  # since the start
    heartbeat_age_s: float | None
    rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    steps: int
    steps_per_s: float
    step_ms: float | None  # mean; None: no step has ended
    step_age_s: float  # of the step that runs now; -1: none
    busy_percent: float  # time within steps
    phase_percent: dict[str, float]  # of the interval, by phase of the step
    phase_us: dict[str, float]  # per step
    stalls_per_s: float  # steps that a front end sat out because its ring was full
    running: int
    max_num_seqs: int
    waiting: int
    waiting_capacity: int
    waiting_deferred: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_used_percent: float
    preemptions_per_s: float
    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensReport:
    """Tokens as front ends took them out of the rings for clients that still wanted them."""

    per_s: float
    total: int
    generated: int  # of finished requests, as usage reports them
    prompt: int  # of finished requests
    ttft_p50_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientsReport:
    open_streams: int
    open_connections: int
    stalled_connections: int  # their sockets take no more: the client does not read
    bytes_per_s: float
    sends_blocked_per_s: float
    slow_client_aborts: int
    rejected_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimitReport:
    cores: float
    used_percent: float  # of the limit, by this server
    throttled_percent: float  # of the periods


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    interval_s: float
    cpu_percent: float  # the whole server, of one core
    tokens: TokensReport
    engine: EngineReport
    clients: ClientsReport
    cpu_limit: CpuLimitReport | None
    rings: tuple[RingReport, ...]
    processes: tuple[ProcessReport, ...]


class _Change:
    """Counters' growth between two snapshots."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self._before, self._after = before.counters, after.counters
        self.seconds = max((after.time_ns - before.time_ns) / 1e9, 1e-9)

    def of(self, name: str) -> int:
        return max(0, self._after.get(name, 0) - self._before.get(name, 0))

    def rate(self, name: str) -> float:
        return self.of(name) / self.seconds

    def now(self, name: str) -> int:
        return self._after.get(name, 0)


def measure(before: Snapshot, after: Snapshot) -> Report:
    """Rates between two snapshots of one server; gauges as they are in the later one."""
    change = _Change(before, after)
    processes = _processes(before, after, change.seconds)
    cpu_percent = sum(process.cpu_percent for process in processes)
    return Report(
        interval_s=change.seconds,
        cpu_percent=cpu_percent,
        tokens=_tokens(before, after, change),
        engine=_engine(after, change),
        clients=_clients(change),
        cpu_limit=_cpu_limit(before, after, cpu_percent),
        rings=_rings(before, after, change.seconds),
        processes=processes,
    )


def _tokens(before: Snapshot, after: Snapshot, change: _Change) -> TokensReport:
    def seconds(name: str, share: float) -> float | None:
        if name not in after.histograms:
            return None
        return quantile(before.histograms.get(name), after.histograms[name], share)

    total = _outputs(after)
    return TokensReport(
        per_s=max(0, total - _outputs(before)) / change.seconds,
        total=total,
        generated=change.now("generation_tokens"),
        prompt=change.now("prompt_tokens"),
        ttft_p50_s=seconds("time_to_first_token_seconds", 0.5),
        itl_p50_s=seconds("inter_token_latency_seconds", 0.5),
        itl_p99_s=seconds("inter_token_latency_seconds", 0.99),
    )


def _outputs(snapshot: Snapshot) -> int:
    """Every output of a request is observed once: its first token, or the time since the one before."""
    names = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    return sum(snapshot.histograms[name].count for name in names if name in snapshot.histograms)


def _engine(after: Snapshot, change: _Change) -> EngineReport:
    steps = change.of("steps")
    phase_s = {phase: change.of(f"step_{phase}_ns") / 1e9 for phase in STEP_PHASES}
    step_s = sum(phase_s.values())
    # A step that has not ended is in no counter yet.
    busy_s = min(change.seconds, step_s + max(0.0, after.step_age_s))
    total_blocks = change.now("kv_blocks_total")
    return EngineReport(
        steps=change.now("steps"),
        steps_per_s=steps / change.seconds,
        step_ms=step_s / steps * 1e3 if steps else None,
        step_age_s=after.step_age_s,
        busy_percent=100 * busy_s / change.seconds,
        phase_percent={phase: 100 * spent_s / change.seconds for phase, spent_s in phase_s.items()},
        phase_us={phase: spent_s / steps * 1e6 if steps else 0.0 for phase, spent_s in phase_s.items()},
        stalls_per_s=change.rate("out_stalls"),
        running=change.now("num_requests_running"),
        max_num_seqs=change.now("max_num_seqs"),
        waiting=change.now("num_requests_waiting"),
        waiting_capacity=change.now("num_requests_waiting_capacity"),
        waiting_deferred=change.now("num_requests_waiting_deferred"),
        kv_blocks_used=change.now("kv_blocks_used"),
        kv_blocks_total=total_blocks,
        kv_used_percent=100 * change.now("kv_blocks_used") / total_blocks if total_blocks else 0.0,
        preemptions_per_s=change.rate("num_preemptions"),
        is_paused=bool(change.now("paused")),
    )


def _clients(change: _Change) -> ClientsReport:
    return ClientsReport(
        open_streams=change.now("open_streams"),
        open_connections=change.now("open_connections"),
        stalled_connections=change.now("stalled_connections"),
        bytes_per_s=change.rate("bytes_sent"),
        sends_blocked_per_s=change.rate("sends_blocked"),
        slow_client_aborts=change.of("slow_client_aborts"),
        rejected_per_s=change.rate("rejected_overloaded") + change.rate("rejected_ring_full"),
    )


def _cpu_limit(before: Snapshot, after: Snapshot, cpu_percent: float) -> CpuLimitReport | None:
    old, new = before.cpu_limit, after.cpu_limit
    if old is None or new is None:
        return None
    periods = new.num_periods - old.num_periods
    throttled = new.num_throttled_periods - old.num_throttled_periods
    return CpuLimitReport(
        cores=new.cores,
        used_percent=cpu_percent / new.cores,
        throttled_percent=100 * throttled / periods if periods > 0 else 0.0,
    )


def _processes(before: Snapshot, after: Snapshot, seconds: float) -> tuple[ProcessReport, ...]:
    earlier = {process.pid: process for process in before.processes}
    return tuple(_process(earlier.get(process.pid), process, seconds) for process in after.processes)


def _process(before: ProcessSnapshot | None, after: ProcessSnapshot, seconds: float) -> ProcessReport:
    def percent(name: str) -> float:
        started = 0 if before is None else getattr(before, name)
        return max(0.0, 100 * float(getattr(after, name) - started) / 1e9 / seconds)

    return ProcessReport(
        name=after.name,
        pid=after.pid,
        phase=after.phase,
        cpu_percent=percent("cpu_ns"),
        main_cpu_percent=percent("main_cpu_ns"),
        main_wait_percent=percent("main_wait_ns"),
        cpu_seconds=after.cpu_ns / 1e9,
        heartbeat_age_s=after.heartbeat_age_s if after.heartbeat_age_s >= 0 else None,
        rss_bytes=after.rss_bytes,
    )


def _rings(before: Snapshot, after: Snapshot, seconds: float) -> tuple[RingReport, ...]:
    earlier = {(ring.frontend, ring.engine, ring.ring): ring for ring in before.rings}
    return tuple(_ring(earlier.get((ring.frontend, ring.engine, ring.ring)), ring, seconds) for ring in after.rings)


def _ring(before: RingStats | None, after: RingStats, seconds: float) -> RingReport:
    def rate(name: str) -> float:
        started = 0 if before is None else getattr(before, name)
        return max(0.0, float(getattr(after, name) - started)) / seconds

    def hop_us(share: float) -> float | None:
        value_s = quantile(None if before is None else before.hop, after.hop, share)
        return None if value_s is None else value_s * 1e6

    return RingReport(
        frontend=after.frontend,
        engine=after.engine,
        ring=after.ring,
        fill_percent=100 * after.used_bytes / after.capacity_bytes if after.capacity_bytes else 0.0,
        used_bytes=after.used_bytes,
        capacity_bytes=after.capacity_bytes,
        frames_per_s=rate("frames"),
        records_per_s=rate("records"),
        full_per_s=rate("full"),
        doorbells_sent_per_s=rate("doorbells_sent"),
        doorbells_suppressed_per_s=rate("doorbells_suppressed"),
        hop_p50_us=hop_us(0.5),
        hop_p99_us=hop_us(0.99),
        frames=after.frames,
        records=after.records,
        full=after.full,
        doorbells_sent=after.doorbells_sent,
        doorbells_suppressed=after.doorbells_suppressed,
    )
