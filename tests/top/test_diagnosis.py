"""The diagnosis on staged snapshots: one interval of one second each."""

from typing import Any

from tests.top.staging import process, ring, snapshot
from tokring.top.diagnosis import Diagnosis, diagnose
from tokring.top.snapshot import CpuLimit

BUSY = {"steps": 50, "step_execute_ns": 930_000_000, "step_sample_ns": 50_000_000, "num_requests_running": 8}


def after_one_second(
    *, front_end: tuple[float, float] = (0.2, 0.0), engine: tuple[float, float] = (0.9, 0.0), **changes: Any
) -> Diagnosis:
    """front_end, engine: seconds that the main thread ran, and waited for a CPU."""
    processes = (process("frontend", front_end[0], *front_end), process("engine", engine[0], *engine))
    idle = (process("frontend", 0, 0, 0), process("engine", 0, 0, 0))
    limit = changes.get("cpu_limit")
    return diagnose(
        snapshot(
            0.0, processes=idle, cpu_limit=limit and CpuLimit(cores=limit.cores, num_periods=0, num_throttled_periods=0)
        ),
        snapshot(1.0, **{"processes": processes, "max_num_seqs": 8, **changes}),
    )


def test_a_server_without_requests_is_idle() -> None:
    diagnosis = after_one_second(front_end=(0.001, 0.0), engine=(0.001, 0.0))
    assert diagnosis.stage == "idle"
    assert "0.20 % of a core" in diagnosis.line


def test_a_paused_engine_is_not_taken_for_a_slow_one() -> None:
    diagnosis = after_one_second(paused=1, num_requests_running=2, num_requests_waiting=5)
    assert diagnosis.stage == "paused"
    assert "7 requests wait" in diagnosis.line


def test_an_engine_that_is_always_in_a_step_limits() -> None:
    diagnosis = after_one_second(**BUSY)
    assert diagnosis.stage == "engine_step"
    assert "98 % busy (execute 93 %), 19.60 ms a step, 8 requests" in diagnosis.line
    assert diagnosis.figures["execute_percent"] == 93


def test_one_endless_step_is_the_engines_too() -> None:
    diagnosis = after_one_second(step_age_s=12.0, num_requests_running=1)
    assert diagnosis.stage == "engine_step"
    assert "12.0 s" in diagnosis.line


def test_an_engine_that_waits_for_a_cpu_says_so() -> None:
    assert "waits for a CPU 40 % of the time" in after_one_second(engine=(0.5, 0.4), **BUSY).line


def test_a_busy_front_end_that_keeps_up_is_not_the_limit() -> None:
    diagnosis = after_one_second(front_end=(0.95, 0.0), rings=(ring(hops=(100, 0, 0)),), **BUSY)
    assert diagnosis.stage == "engine_step"


def test_a_saturated_front_end_with_a_backlog_limits() -> None:
    diagnosis = after_one_second(front_end=(0.97, 0.0), rings=(ring(used_bytes=3 << 20),), **BUSY)
    assert diagnosis.stage == "front_end"
    assert "75 % full" in diagnosis.line


def test_a_front_end_that_gets_no_cpu_limits_though_it_uses_little() -> None:
    slow_hops = ring(hops=(0, 10, 0), bounds=(0.01, 0.02))
    diagnosis = after_one_second(front_end=(0.3, 0.65), rings=(slow_hops,), **BUSY)
    assert diagnosis.stage == "front_end"
    assert "gets 30 % of a core and waits for one 65 % of the time" in diagnosis.line


def test_a_saturated_front_end_that_leaves_the_engine_idle_limits() -> None:
    diagnosis = after_one_second(front_end=(0.97, 0.0), steps=10, step_execute_ns=400_000_000, num_requests_running=2)
    assert diagnosis.stage == "front_end"


def test_a_front_end_for_which_the_engine_sits_out_steps_limits() -> None:
    assert after_one_second(front_end=(0.9, 0.0), out_stalls=5, **BUSY).stage == "front_end"


def test_clients_that_do_not_read_limit() -> None:
    diagnosis = after_one_second(stalled_connections=64, open_streams=128, **BUSY)
    assert diagnosis.stage == "clients"
    assert "64 connections of 128 streams" in diagnosis.line


def test_a_few_slow_clients_among_many_do_not() -> None:
    assert after_one_second(stalled_connections=3, open_streams=128, **BUSY).stage == "engine_step"


def test_waiting_requests_are_a_queue_and_the_seats_are_named() -> None:
    diagnosis = after_one_second(num_requests_waiting=40, **BUSY)
    assert diagnosis.stage == "queueing"
    assert "40 requests wait, 8 run: all 8 seats (--max-num-seqs) are taken" in diagnosis.line


def test_a_queue_before_free_seats_and_a_full_cache_names_the_cache() -> None:
    changes = {**BUSY, "num_requests_running": 4, "kv_blocks_used": 97, "kv_blocks_total": 100}
    assert "KV cache is 97 % full" in after_one_second(num_requests_waiting=2, **changes).line


def test_a_throttled_container_comes_before_everything_else() -> None:
    limit = CpuLimit(cores=1.5, num_periods=10, num_throttled_periods=4)
    diagnosis = after_one_second(cpu_limit=limit, num_requests_waiting=40, **BUSY)
    assert diagnosis.stage == "cpu_limit"
    assert "1.5 cores" in diagnosis.line and "throttled in 40 % of the periods" in diagnosis.line


def test_a_limit_that_does_not_strike_limits_nothing() -> None:
    limit = CpuLimit(cores=4.0, num_periods=10, num_throttled_periods=0)
    assert after_one_second(cpu_limit=limit, **BUSY).stage == "engine_step"


def test_a_process_without_a_heartbeat_is_silent() -> None:
    stopped = (process("frontend", 0, 0, 0), process("engine", 0, 0, 0, heartbeat_age_s=7.0))
    diagnosis = after_one_second(processes=stopped, **BUSY)
    assert diagnosis.stage == "silent"
    assert "engine 0 (pid 12)" in diagnosis.line


def test_a_server_that_loads_is_loading() -> None:
    loading = (process("frontend", 0, 0, 0), process("engine", 0, 0, 0, phase="loading"))
    assert after_one_second(processes=loading).stage == "loading"


def test_an_engine_with_pauses_between_requests_waits_for_its_clients() -> None:
    diagnosis = after_one_second(steps=10, step_execute_ns=300_000_000, num_requests_running=1)
    assert diagnosis.stage == "demand"
    assert "engine 30 % busy" in diagnosis.line
