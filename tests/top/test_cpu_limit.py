"""The CPU limit from a cgroup tree of either version, written as files."""

import os
import time
from pathlib import Path

from tokring.top.process_use import read_cpu_limit, read_process_use


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2_takes_the_tightest_limit_of_the_group_and_its_parents(tmp_path: Path) -> None:
    write(tmp_path / "proc/7/cgroup", "0::/pod/server\n")
    write(tmp_path / "sys/pod/cpu.max", "150000 100000\n")
    write(tmp_path / "sys/pod/cpu.stat", "usage_usec 5\nnr_periods 20\nnr_throttled 4\n")
    write(tmp_path / "sys/pod/server/cpu.max", "max 100000\n")
    limit = read_cpu_limit(7, proc=tmp_path / "proc", mount=tmp_path / "sys")
    assert limit is not None
    assert (limit.cores, limit.num_periods, limit.num_throttled_periods) == (1.5, 20, 4)


def test_a_path_outside_of_the_container_falls_back_to_the_mount(tmp_path: Path) -> None:
    write(tmp_path / "proc/7/cgroup", "0::/kubepods/somewhere/else\n")
    write(tmp_path / "sys/cpu.max", "200000 100000\n")
    limit = read_cpu_limit(7, proc=tmp_path / "proc", mount=tmp_path / "sys")
    assert limit is not None and limit.cores == 2.0


def test_version_1_has_its_own_files(tmp_path: Path) -> None:
    write(tmp_path / "proc/7/cgroup", "5:memory:/a\n4:cpu,cpuacct:/a\n")
    write(tmp_path / "sys/cpu,cpuacct/a/cpu.cfs_quota_us", "50000\n")
    write(tmp_path / "sys/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n")
    limit = read_cpu_limit(7, proc=tmp_path / "proc", mount=tmp_path / "sys")
    assert limit is not None and limit.cores == 0.5


def test_no_quota_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path / "proc/7/cgroup", "4:cpu:/\n0::/\n")
    write(tmp_path / "sys/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "sys/cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "sys/cpu.max", "max 100000\n")
    assert read_cpu_limit(7, proc=tmp_path / "proc", mount=tmp_path / "sys") is None


def test_the_cpu_time_of_a_process_is_the_kernels() -> None:
    before = time.process_time_ns()
    use = read_process_use(os.getpid())
    after = time.process_time_ns()
    assert use is not None
    assert before <= use.cpu_ns <= after
    assert 0 < use.rss_bytes


def test_a_process_that_is_gone_has_no_use() -> None:
    assert read_process_use(2**22 + 5) is None
