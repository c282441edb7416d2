"""diagnose(): one line that says which stage limits the server now, with the figures behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokring.top.report import EngineReport, ProcessReport, Report, measure
from tokring.top.snapshot import Snapshot

# Shares are percent of the interval unless said otherwise.
SILENT_S = 3.0  # the same as /health's
SATURATED = 85.0  # a thread that wants a CPU for this long has no reserve
WAITS_FOR_CPU = 20.0  # worth a word
THROTTLED = 10.0  # of the periods
STALLED_CLIENTS = 25.0  # of the open streams
BACKLOG_HOP_US = 2000.0  # frames that wait this long in the median: the reader is behind
BACKLOG_FILL = 10.0  # of the ring
KV_FULL = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """stage: "idle", "loading", "silent", "paused", "cpu_limit", "front_end", "clients", "queueing", "engine_step" or
    "demand"."""

    stage: str
    line: str
    figures: Mapping[str, float]


def diagnose(before: Snapshot, after: Snapshot) -> Diagnosis:
    """What limits throughput between two snapshots. The first rule that applies decides; they go from cause to effect:
    a throttled container slows every stage, a front end that is behind fills queues, queues keep the engine busy."""
    report = measure(before, after)
    for rule in (_loading, _silent, _paused, _idle, _cpu_limit, _clients, _front_end, _queueing, _engine_step):
        diagnosis = rule(report)
        if diagnosis is not None:
            return diagnosis
    return _demand(report)


def _loading(report: Report) -> Diagnosis | None:
    late = [process for process in report.processes if process.phase in ("starting", "loading", "warming")]
    if not late:
        return None
    return Diagnosis(stage="loading", line=f"loading: {late[0].name} is not ready yet", figures={})


def _silent(report: Report) -> Diagnosis | None:
    for process in report.processes:
        age_s = process.heartbeat_age_s
        if age_s is not None and age_s > SILENT_S:
            line = f"silent: {process.name} (pid {process.pid}) has given no sign of life for {age_s:.0f} s"
            return Diagnosis(stage="silent", line=line, figures={"heartbeat_age_s": age_s})
    return None


def _paused(report: Report) -> Diagnosis | None:
    engine = report.engine
    if not engine.is_paused:
        return None
    line = f"paused: {engine.running + engine.waiting} requests wait for POST /resume"
    return Diagnosis(stage="paused", line=line, figures={"running": engine.running, "waiting": engine.waiting})


def _idle(report: Report) -> Diagnosis | None:
    engine = report.engine
    if engine.running or engine.waiting or engine.steps_per_s or engine.step_age_s >= 0 or report.tokens.per_s:
        return None
    line = f"idle: no request; the server uses {report.cpu_percent:.2f} % of a core"
    return Diagnosis(stage="idle", line=line, figures={"cpu_percent": report.cpu_percent})


def _cpu_limit(report: Report) -> Diagnosis | None:
    limit = report.cpu_limit
    if limit is None or limit.throttled_percent < THROTTLED:
        return None
    return Diagnosis(
        stage="cpu_limit",
        line=f"the container's CPU limit: {limit.cores:g} cores, {limit.used_percent:.0f} % of them used by this "
        f"server, throttled in {limit.throttled_percent:.0f} % of the periods",
        figures={
            "cores": limit.cores,
            "used_percent": limit.used_percent,
            "throttled_percent": limit.throttled_percent,
        },
    )


def _clients(report: Report) -> Diagnosis | None:
    clients = report.clients
    share = 100 * clients.stalled_connections / max(1, clients.open_streams)
    if share < STALLED_CLIENTS:
        return None
    return Diagnosis(
        stage="clients",
        line=f"clients do not drain: {clients.stalled_connections} connections of {clients.open_streams} streams take "
        f"no more, {clients.slow_client_aborts} were given up just now; {clients.bytes_per_s / 1e3:.0f} kB/s leave",
        figures={
            "stalled_connections": clients.stalled_connections,
            "open_streams": clients.open_streams,
            "slow_client_aborts": clients.slow_client_aborts,
        },
    )


def _front_end(report: Report) -> Diagnosis | None:
    """A front end whose event loop has no reserve, while the engine waits for it or runs ahead of it."""
    front_ends = [process for process in report.processes if process.name.startswith("frontend")]
    if not front_ends:
        return None
    worst = max(front_ends, key=_wanted_percent)
    if _wanted_percent(worst) < SATURATED or not _is_behind(report):
        return None
    out_rings = [ring for ring in report.rings if ring.ring == "out"]
    fill = max((ring.fill_percent for ring in out_rings), default=0.0)
    hop_ms = max((ring.hop_p50_us or 0.0 for ring in out_rings), default=0.0) / 1e3
    line = (
        f"front-end CPU: the loop of {worst.name} gets {worst.main_cpu_percent:.0f} % of a core and waits for one "
        f"{worst.main_wait_percent:.0f} % of the time; its ring is {fill:.0f} % full, frames wait {hop_ms:.1f} ms in "
        f"it, the engine is busy {report.engine.busy_percent:.0f} %"
    )
    return Diagnosis(
        stage="front_end",
        line=line,
        figures={
            "main_cpu_percent": worst.main_cpu_percent,
            "main_wait_percent": worst.main_wait_percent,
            "out_fill_percent": fill,
            "hop_p50_ms": hop_ms,
            "engine_busy_percent": report.engine.busy_percent,
            "engine_stalls_per_s": report.engine.stalls_per_s,
        },
    )


def _wanted_percent(process: ProcessReport) -> float:
    return process.main_cpu_percent + process.main_wait_percent


def _is_behind(report: Report) -> bool:
    """Whether steps wait for the front end: an engine with requests is always in some step, its rings tell."""
    if report.engine.stalls_per_s or report.engine.busy_percent < SATURATED:
        return True
    return any(
        ring.fill_percent >= BACKLOG_FILL or (ring.hop_p50_us or 0.0) >= BACKLOG_HOP_US
        for ring in report.rings
        if ring.ring == "out"
    )


def _queueing(report: Report) -> Diagnosis | None:
    engine = report.engine
    if not engine.waiting:
        return None
    return Diagnosis(
        stage="queueing",
        line=f"queueing: {engine.waiting} requests wait, {engine.running} run: {_what_is_short(engine)}; "
        f"{_step_words(engine)}",
        figures={
            "waiting": engine.waiting,
            "running": engine.running,
            "max_num_seqs": engine.max_num_seqs,
            "kv_used_percent": engine.kv_used_percent,
            "rejected_per_s": report.clients.rejected_per_s,
        },
    )


def _what_is_short(engine: EngineReport) -> str:
    if engine.running >= engine.max_num_seqs > 0:
        return f"all {engine.max_num_seqs} seats (--max-num-seqs) are taken"
    if engine.kv_used_percent >= KV_FULL or engine.preemptions_per_s:
        return f"the KV cache is {engine.kv_used_percent:.0f} % full"
    return "prompts take the step's token budget (--max-num-batched-tokens)"


def _engine_step(report: Report) -> Diagnosis | None:
    engine = report.engine
    if engine.busy_percent < SATURATED:
        return None
    wait = next((process.main_wait_percent for process in report.processes if process.name.startswith("engine")), 0.0)
    starved = f"; its main thread waits for a CPU {wait:.0f} % of the time" if wait >= WAITS_FOR_CPU else ""
    return Diagnosis(
        stage="engine_step",
        line=f"engine step: {_step_words(engine)}, {engine.running} requests{starved}",
        figures={
            "busy_percent": engine.busy_percent,
            "step_ms": engine.step_ms or engine.step_age_s * 1e3,
            "running": engine.running,
            "main_wait_percent": wait,
            **{f"{phase}_percent": share for phase, share in engine.phase_percent.items()},
        },
    )


def _step_words(engine: EngineReport) -> str:
    if engine.step_ms is None:
        return f"one step has been running for {max(engine.step_age_s, 0):.1f} s"
    phase, share = max(engine.phase_percent.items(), key=lambda item: item[1])
    return f"{engine.busy_percent:.0f} % busy ({phase} {share:.0f} %), {engine.step_ms:.2f} ms a step"


def _demand(report: Report) -> Diagnosis:
    engine = report.engine
    return Diagnosis(
        stage="demand",
        line=f"nothing: clients ask for no more; {engine.running} requests, engine {engine.busy_percent:.0f} % busy",
        figures={"busy_percent": engine.busy_percent, "running": engine.running},
    )
