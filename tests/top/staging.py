"""Staged snapshots: a server with one front end and one engine, as figures."""

from tokring.top.snapshot import CpuLimit, ProcessSnapshot, Snapshot
from tokring_ipc import Histogram, RingStats

HOP_BOUNDS = (0.0001, 0.0002)


def histogram(count: int) -> Histogram:
    return Histogram((1.0,), (count, 0), 0.0)


def ring(
    name: str = "out",
    *,
    frames: int = 0,
    hops: tuple[int, ...] = (0, 0, 0),
    bounds: tuple[float, ...] = HOP_BOUNDS,
    used_bytes: int = 0,
    capacity_bytes: int = 4 << 20,
    doorbells_sent: int = 0,
) -> RingStats:
    return RingStats(
        frontend=0,
        engine=0,
        ring=name,
        used_bytes=used_bytes,
        capacity_bytes=capacity_bytes,
        frames=frames,
        records=frames,
        full=0,
        doorbells_sent=doorbells_sent,
        doorbells_suppressed=0,
        received_frames=frames,
        received_records=frames,
        sleeps=0,
        hop=Histogram(bounds, hops, 0.0),
    )


def process(role: str, cpu_s: float, main_cpu_s: float, main_wait_s: float, **changes: object) -> ProcessSnapshot:
    values: dict[str, object] = {"phase": "ready", "heartbeat_age_s": 0.5, **changes}
    return ProcessSnapshot(
        role=role,
        index=0,
        pid={"frontend": 11, "engine": 12}[role],
        cpu_ns=int(cpu_s * 1e9),
        main_cpu_ns=int(main_cpu_s * 1e9),
        main_wait_ns=int(main_wait_s * 1e9),
        rss_bytes=1,
        **values,  # type: ignore[arg-type]
    )


def snapshot(
    time_s: float,
    *,
    cpu_s: float | None = 0.0,
    processes: tuple[ProcessSnapshot, ...] | None = None,
    histograms: dict[str, Histogram] | None = None,
    rings: tuple[RingStats, ...] = (),
    cpu_limit: CpuLimit | None = None,
    step_age_s: float = -1.0,
    **counters: int,
) -> Snapshot:
    """cpu_s: of both processes; None: there are no processes."""
    if processes is None:
        processes = () if cpu_s is None else tuple(process(role, cpu_s, cpu_s, 0.0) for role in ("frontend", "engine"))
    return Snapshot(
        time_ns=int(time_s * 1e9),
        processes=processes,
        counters=counters,
        histograms=histograms or {},
        rings=rings,
        cpu_limit=cpu_limit,
        step_age_s=step_age_s,
    )
