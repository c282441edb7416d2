"""What the memory cgroup still allows, read before a segment is reserved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokring_ipc._core import cgroup_memory_available, crc32c


@pytest.fixture
def own_cgroup(tmp_path: Path) -> Path:
    """This process's directory in an empty cgroup tree at tmp_path."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    directory = tmp_path / path.strip("/")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def limit(directory: Path, maximum: str, current: int, inactive_file: int = 0) -> None:
    (directory / "memory.max").write_text(f"{maximum}\n")
    (directory / "memory.current").write_text(f"{current}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def test_without_limit_nothing_is_known(own_cgroup: Path, tmp_path: Path) -> None:
    assert cgroup_memory_available(str(tmp_path)) is None
    limit(own_cgroup, "max", 1000)
    assert cgroup_memory_available(str(tmp_path)) is None


def test_page_cache_that_can_go_counts_as_available(own_cgroup: Path, tmp_path: Path) -> None:
    limit(own_cgroup, "10000", 7000, inactive_file=2000)
    assert cgroup_memory_available(str(tmp_path)) == 5000


def test_a_used_up_limit_leaves_nothing(own_cgroup: Path, tmp_path: Path) -> None:
    limit(own_cgroup, "1000", 7000)
    assert cgroup_memory_available(str(tmp_path)) == 0


def test_the_tightest_parent_counts(own_cgroup: Path, tmp_path: Path) -> None:
    limit(own_cgroup, "10000", 1000)
    limit(tmp_path, "4000", 1000)
    assert cgroup_memory_available(str(tmp_path)) == 3000


def test_the_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the catalogue of CRCs
    assert crc32c(b"") == 0
