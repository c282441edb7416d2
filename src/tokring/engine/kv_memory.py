"""How many KV blocks there is memory for."""

from __future__ import annotations

from pathlib import Path

from tokring.engine.cgroup import cgroup_directories

DEFAULT_SHARE = 0.25  # of the memory available at start
DEFAULT_MAX_BYTES = 4 << 30
MAX_BLOCKS = 1 << 20  # bookkeeping is per block; 16 million tokens are more than any prompt cache finds use for


class KvMemoryError(ValueError):
    """The KV cache can't hold one sequence of the model's length; says what would fit."""


def num_kv_blocks(*, bytes_per_block: int, block_size: int, max_model_len: int, memory_bytes: int) -> int:
    """Return the blocks that fit into memory_bytes; raises KvMemoryError if one full sequence does not."""
    num_blocks = min(memory_bytes // bytes_per_block, MAX_BLOCKS)
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        fits = num_blocks * block_size
        remedy = f"use --max-model-len {fits} or less, or " if fits >= 2 else ""
        needed_bytes = needed * bytes_per_block
        raise KvMemoryError(
            f"KV cache: one sequence of {max_model_len} tokens needs {needed_bytes / 2**20:.1f} MiB, there are "
            f"{memory_bytes / 2**20:.1f} MiB: {remedy}--kv-cache-memory-bytes {needed_bytes} or more"
        )
    return num_blocks


def check_available(num_bytes: int, available_bytes: int) -> None:
    """Raises KvMemoryError if there is not that much: memory is taken page by page, much later, with a fatal end."""
    if num_bytes > available_bytes:
        raise KvMemoryError(
            f"KV cache: {num_bytes / 2**20:.1f} MiB are asked for, {available_bytes / 2**20:.1f} MiB of memory are "
            "available: give a smaller --kv-cache-memory-bytes"
        )


def default_kv_memory_bytes() -> int:
    """min(4 GiB, a quarter of the memory that is available under the cgroup)."""
    return min(DEFAULT_MAX_BYTES, int(available_memory_bytes() * DEFAULT_SHARE))


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be taken without swapping: of the machine, or of the tightest cgroup (v2 or v1) above us."""
    available = _machine_available(proc)
    for directory, version in cgroup_directories("memory", proc, cgroup):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, usage = (_number(directory / name) for name in names)
        if limit is not None and usage is not None:
            available = min(available, limit - usage + _reclaimable(directory))
    return max(available, 0)


def _machine_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KvMemoryError("/proc/meminfo has no MemAvailable: give --kv-cache-memory-bytes")


def _reclaimable(directory: Path) -> int:
    """File cache that the kernel gives up before it kills anybody (a model file just read counts as usage)."""
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
