"""render(): a report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokring.top.diagnosis import Diagnosis
from tokring.top.report import Report

NONE = "–"


def render(supervisor_pid: int, report: Report, diagnosis: Diagnosis) -> RenderableType:
    """Everything on one screen."""
    return Group(
        Text(f"tokring, pid {supervisor_pid}, over {report.interval_s:.1f} s", style="bold"),
        Text(f"limit: {diagnosis.line}", style="bold yellow"),
        _summary(report),
        _processes(report),
        _steps(report),
        _rings(report),
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _summary(report: Report) -> Table:
    table = _table("tokens/s", "running", "waiting", "KV", "streams", "stalled", "TTFT p50", "ITL p50", "ITL p99")
    engine, clients, tokens = report.engine, report.clients, report.tokens
    table.add_row(
        f"{tokens.per_s:,.0f}",
        f"{engine.running}/{engine.max_num_seqs}",
        str(engine.waiting),
        f"{engine.kv_used_percent:.0f} %",
        str(clients.open_streams),
        str(clients.stalled_connections),
        *(_milliseconds(value) for value in (tokens.ttft_p50_s, tokens.itl_p50_s, tokens.itl_p99_s)),
    )
    return table


def _milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds * 1e3:.1f} ms"


def _processes(report: Report) -> Table:
    table = _table("process", "pid", "phase", "CPU", "main thread", "waits", "heartbeat", "memory")
    for process in report.processes:
        age_s = process.heartbeat_age_s
        table.add_row(
            process.name,
            str(process.pid),
            process.phase,
            f"{process.cpu_percent:.1f} %",
            f"{process.main_cpu_percent:.1f} %",
            f"{process.main_wait_percent:.1f} %",
            NONE if age_s is None else f"{age_s:.1f} s",
            f"{process.rss_bytes / 1e6:.0f} MB",
        )
    return table


def _steps(report: Report) -> Table:
    engine = report.engine
    table = _table("steps/s", "ms/step", "busy", *(f"{phase[:5]} µs" for phase in engine.phase_us))
    table.add_row(
        f"{engine.steps_per_s:,.0f}",
        NONE if engine.step_ms is None else f"{engine.step_ms:.2f}",
        f"{engine.busy_percent:.0f} %",
        *(f"{value:,.0f}" for value in engine.phase_us.values()),
    )
    return table


def _rings(report: Report) -> Table:
    table = _table("ring", "fill", "frames/s", "records/s", "hop p50", "hop p99", "rung/s", "spared/s", "full")
    for ring in report.rings:
        rates: Iterable[float] = (ring.doorbells_sent_per_s, ring.doorbells_suppressed_per_s)
        table.add_row(
            f"{ring.ring} {ring.frontend}→{ring.engine}"
            if ring.ring == "req"
            else f"out {ring.engine}→{ring.frontend}",
            f"{ring.fill_percent:.1f} %",
            f"{ring.frames_per_s:,.0f}",
            f"{ring.records_per_s:,.0f}",
            _microseconds(ring.hop_p50_us),
            _microseconds(ring.hop_p99_us),
            *(f"{rate:,.0f}" for rate in rates),
            str(ring.full),
        )
    return table


def _microseconds(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f} µs"
