"""What the memory cgroup still allows, read before a segment is reserved; and real limits."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokring_ipc import AttachError, FrontEndChannel
from tokring_ipc._core import cgroup_memory_available, crc32c

MIB = 1 << 20
LIMIT_BYTES = 128 * MIB
PATIENCE_S = 30.0


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


@pytest.fixture
def version_1_cgroup(tmp_path: Path) -> Path:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.partition(":memory:")[2] for line in lines if ":memory:" in line), "/")
    directory = tmp_path / "memory" / path.strip("/")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def test_version_1_of_cgroups_is_read_too(version_1_cgroup: Path, tmp_path: Path) -> None:
    (version_1_cgroup / "memory.usage_in_bytes").write_text("7000\n")
    (version_1_cgroup / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 2000\n")
    (version_1_cgroup / "memory.limit_in_bytes").write_text("10000\n")
    assert cgroup_memory_available(str(tmp_path)) == 5000
    (version_1_cgroup / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # how it says "none"
    assert cgroup_memory_available(str(tmp_path)) is None


# ---- an engine in a cgroup with a small limit ----


def own_memory_cgroup() -> tuple[Path, str]:
    """The directory of this process's memory cgroup, version 2 or 1, and its file for the limit."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return root / "memory" / path.strip("/"), "memory.limit_in_bytes"
        if number == "0" and (root / "cgroup.controllers").exists():
            return root / path.strip("/"), "memory.max"
    return root, "memory.max"


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup of LIMIT_BYTES below this process's own. Skips where none can be made."""
    own, limit_file = own_memory_cgroup()
    group = own / f"tokring-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made below {own}: {error}")
    try:
        (group / limit_file).write_text(str(LIMIT_BYTES))
    except OSError as error:
        group.rmdir()
        pytest.skip(f"the memory controller is not for cgroups below {own}: {error}")
    yield group
    group.rmdir()


ENGINE = """
import os, socket, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from tokring_ipc import AttachError, EngineChannel
control = socket.socket(fileno=int(sys.argv[2]))
try:
    with EngineChannel.accept(control, int(sys.argv[3]), int(sys.argv[4]), timeout_s=30) as channel:
        taken = []
        while True:  # until the kernel ends it
            taken.append(b"x" * (1 << 20))
except AttachError as error:
    print(error)
"""


class LimitedEngine:
    """An engine process inside the cgroup, and this process's ends of its channel. Use in a `with`."""

    def __init__(self, group: Path) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        req_read, self.req_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.out_read, out_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        fds = (theirs.fileno(), req_read, out_write)
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(group), *map(str, fds)], pass_fds=fds, stdout=subprocess.PIPE, text=True
        )
        theirs.close()
        os.close(req_read)
        os.close(out_write)

    def connect(self, out_bytes: int) -> FrontEndChannel:
        return FrontEndChannel.connect(
            self.control, self.req_write, self.out_read, out_bytes=out_bytes, timeout_s=PATIENCE_S
        )

    def __enter__(self) -> LimitedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.control.close()
        os.close(self.req_write)
        os.close(self.out_read)


def test_rings_above_the_limit_are_an_error_on_both_sides(small_cgroup: Path) -> None:
    with LimitedEngine(small_cgroup) as engine:
        with pytest.raises(AttachError, match="the memory cgroup has [0-9]+ left: raise its limit, or use smaller"):
            engine.connect(out_bytes=2 * LIMIT_BYTES)
        said, _ = engine.process.communicate(timeout=PATIENCE_S)
        assert "the memory cgroup has" in said
        assert engine.process.returncode == 0


def test_an_engine_that_the_kernel_ends_for_its_memory_leaves_an_end_of_file(small_cgroup: Path) -> None:
    with LimitedEngine(small_cgroup) as engine, engine.connect(out_bytes=1 * MIB) as front_end:
        ready, _, _ = select.select([engine.control], [], [], PATIENCE_S)
        assert ready and engine.control.recv(1) == b""
        assert front_end.poll() is None  # the survivor reads on: nothing was published, nothing is torn
        assert engine.process.wait(PATIENCE_S) == -9


def test_the_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the catalogue of CRCs
    assert crc32c(b"") == 0
