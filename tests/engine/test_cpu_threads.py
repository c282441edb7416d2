"""As many threads compute as there are cores for them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tokring.engine.cpu_threads import default_cpu_threads, quota_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc/self/cgroup", "3:cpu,cpuacct:/docker/abc\n0::/a.slice/b.scope\n")
    return tmp_path / "proc"


def test_without_a_quota_all_cores_count(proc: Path, tmp_path: Path) -> None:
    write(tmp_path / "cg/a.slice/b.scope/cpu.max", "max 100000\n")
    write(tmp_path / "cg/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cg/cpu/cpu.cfs_period_us", "100000\n")
    assert quota_cores(proc, tmp_path / "cg") == math.inf
    assert quota_cores(tmp_path / "no proc", tmp_path / "cg") == math.inf


def test_the_tightest_group_above_us_limits(proc: Path, tmp_path: Path) -> None:
    write(tmp_path / "cg/a.slice/b.scope/cpu.max", "800000 100000\n")
    write(tmp_path / "cg/a.slice/cpu.max", "250000 100000\n")
    assert quota_cores(proc, tmp_path / "cg") == 2.5


def test_a_quota_of_cgroup_version_1_limits_too(proc: Path, tmp_path: Path) -> None:
    write(tmp_path / "cg/cpu/cpu.cfs_quota_us", "50000\n")
    write(tmp_path / "cg/cpu/cpu.cfs_period_us", "100000\n")
    assert quota_cores(proc, tmp_path / "cg") == 0.5


@pytest.mark.parametrize(
    ("cores", "quota", "threads"), [(2, "max", 2), (4, "max", 4), (8, "max", 7), (8, "290000", 2), (8, "50000", 1)]
)
def test_threads_are_the_cores_or_the_quota_less_one_where_there_are_many(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, quota: str, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    write(tmp_path / "cg/a.slice/b.scope/cpu.max", f"{quota} 100000\n")
    assert default_cpu_threads(proc, tmp_path / "cg") == threads
