"""Servers where /dev/shm is tiny, full of foreign names, or shared with another server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.own_namespace import ROOT, needs_mounts
from tests.support.serving import mock_server, tiny_model
from tokring_ipc import STATS_PAGE_BYTES

SERVE = """
from tests.support.serving import mock_server
with mock_server() as server:
    print("health", server.health())
"""


def serve_with_shm(size: str) -> subprocess.CompletedProcess[str]:
    """A mock server in a mount namespace whose /dev/shm has `size` bytes."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", SERVE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


@needs_mounts
@pytest.mark.parametrize("size", ["1m", "64m"])
def test_the_rings_do_not_need_dev_shm(size: str) -> None:
    done = serve_with_shm(size)
    assert done.stdout == "health 200\n", done.stderr


@needs_mounts
def test_a_dev_shm_too_small_for_the_stats_pages_is_a_clear_error() -> None:
    done = serve_with_shm("8k")
    assert re.search(r"cannot create the stats pages in /dev/shm, \d+ KiB together: .*No space left", done.stderr)


@pytest.mark.parametrize(
    ("limit_kib", "code", "what"),
    [
        (10, 2, f"cannot create the stats pages in /dev/shm, {4 * STATS_PAGE_BYTES >> 10} KiB together"),
        (1000, 1, "can't start"),
    ],
    ids=["pages", "rings"],
)
def test_a_limit_of_file_sizes_that_shared_memory_meets_is_named_in_one_line(
    limit_kib: int, code: int, what: str
) -> None:
    serve = [sys.executable, "-m", "tokring", "serve", "--port", "0", "--engine", "mock", "--model", tiny_model()]
    done = subprocess.run(
        ["bash", "-c", f'ulimit -f {limit_kib} && exec "$@"', "bash", *serve],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == code
    assert done.stderr == (
        f"tokring: error: {what}: [Errno 27] File too large: "
        f"the limit of file sizes is {limit_kib} KiB, which shared memory is bound by too (ulimit -f)\n"
    )


def test_foreign_names_are_left_alone_and_two_servers_do_not_meet() -> None:
    foreign = [Path("/dev/shm") / f"{name}.{os.getpid()}" for name in ("psm_x", "tokring", "tokring.1.x.cook")]
    for path in foreign:
        path.write_bytes(b"not a page")
    try:
        with mock_server() as one, mock_server() as other:
            assert one.url != other.url
            assert set(one.pages()).isdisjoint(other.pages())
            assert one.health() == other.health() == 200
            one.kill()
            assert other.health() == 200
        assert one.pages() != []  # nobody was left to remove them
        with mock_server():
            assert one.pages() == []
        assert [path.read_bytes() for path in foreign] == [b"not a page"] * 3
    finally:
        for path in foreign:
            path.unlink()


def test_an_address_space_too_small_for_the_kv_cache_is_a_clear_error() -> None:
    serve = [sys.executable, "-m", "tokring", "serve", "--device", "cpu", "--port", "0"]
    serve += ["--model", tiny_model(), "--kv-cache-memory-bytes", "2G"]
    limited = ["bash", "-c", 'ulimit -v 2000000 && exec "$@"', "bash", *serve]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert re.search(r"KV cache: 20\d\d\.\d MiB can't be allocated .* a smaller --kv-cache-memory-bytes", done.stderr)
    assert "Traceback" not in done.stderr
