"""Stats pages: what each process counts, in POSIX shared memory under a name, read by anybody who may.

One page per role and index. The supervisor creates it, the process of that role writes it, its successors continue it
(counters never fall). Everybody who has a page open for writing holds a shared lock on it, so that sweep_stale()
removes only pages nobody writes any more.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import posix_ipc

from tokring_ipc import _core
from tokring_ipc.enums import Role

_SHM = Path("/dev/shm")
_PREFIX = "tokring."


class StatRow(NamedTuple):
    """One row of the compiled table. kind: "c" counter, "g" gauge, "h" histogram."""

    name: str
    kind: str
    first_word: int
    instances: int
    words: int
    scale: float
    bounds: tuple[float, ...]


STATS_TABLE: tuple[StatRow, ...] = tuple(StatRow(*row) for row in _core.stats_table())
STAT_INDEX: dict[str, int] = {row.name: number for number, row in enumerate(STATS_TABLE)}
WORD_INDEX: dict[str, int] = {row.name: row.first_word for row in STATS_TABLE}


@dataclass(frozen=True, slots=True)
class Histogram:
    """bounds: upper bounds without +Inf; buckets: observations per bucket, not cumulative, one more than bounds."""

    bounds: tuple[float, ...]
    buckets: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.buckets)


@dataclass(frozen=True, slots=True)
class PageName:
    """The parts of /tokring.<supervisor pid>.<token>.<role>.<index>; pid and token name one server."""

    name: str
    supervisor_pid: int
    token: str
    role: Role
    index: int


def server_prefix() -> str:
    """A fresh name prefix for the pages of the server that this process supervises."""
    return f"/{_PREFIX}{os.getpid()}.{secrets.token_hex(4)}"


def page_name(prefix: str, role: Role, index: int) -> str:
    return f"{prefix}.{role.name.lower()}.{index}"


def parse_page_name(name: str) -> PageName | None:
    """None if the name is not one of ours."""
    parts = name.removeprefix("/").split(".")
    if len(parts) != 5 or parts[0] != "tokring" or not (parts[1].isdigit() and parts[4].isdigit()):
        return None
    role = parts[3].upper()
    if role not in Role.__members__:
        return None
    return PageName("/" + ".".join(parts), int(parts[1]), parts[2], Role[role], int(parts[4]))


class StatsPage(_core.StatsMap):
    """One page. Obtain it with create(), continue_() or attach(); use it in a `with` or close() it.

    add/set/observe/observe_many take a stat's name or, faster, its number STAT_INDEX[name]; `counters` is the table's
    words as a numpy array (WORD_INDEX[name] + instance). Each word has one writer: the page's own process.
    """

    _memory: posix_ipc.SharedMemory

    def __init__(self, memory: posix_ipc.SharedMemory, role: int, index: int, writable: bool) -> None:
        super().__init__(memory.fd, role, index, writable)
        self._memory = memory
        self.name: str = memory.name

    @classmethod
    def create(cls, name: str, role: Role, index: int = 0) -> StatsPage:
        """A new page; the caller unlinks it. Raises FileExistsError, or OSError if there is no room for it."""
        while True:
            try:
                memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
            except posix_ipc.ExistentialError as error:
                raise FileExistsError(f"stats page {name} exists already") from error
            if _lock(memory):
                break
        try:
            # tmpfs allocates lazily: with ftruncate alone a full /dev/shm would be a SIGBUS at the first count.
            os.posix_fallocate(memory.fd, 0, _core.STATS_PAGE_BYTES)
            return cls(memory, role, index, True)
        except BaseException:
            memory.close_fd()
            posix_ipc.unlink_shared_memory(name)
            raise

    @classmethod
    def continue_(cls, name: str) -> StatsPage:
        """The page of this process's role, created by the supervisor: counters go on, gauges restart at 0."""
        parsed = parse_page_name(name)
        if parsed is None:
            raise ValueError(f"{name!r} is no name of a stats page: /tokring.<pid>.<token>.<role>.<index>")
        memory = _open(name)
        if not _lock(memory):
            raise FileNotFoundError(f"stats page {name} was swept away: the server that made it has ended")
        return _construct(memory, parsed.role, parsed.index, writable=True)

    @classmethod
    def attach(cls, name: str) -> StatsPage:
        """Read-only, without a lock. Raises FileNotFoundError, PermissionError or AttachError."""
        return _construct(_open(name, writable=False), 0, 0, writable=False)

    def read(self) -> StatsSums:
        return read_sums([self])

    def unlink(self) -> None:
        """Removes the name; the page lives on where it is mapped. Idempotent."""
        try:
            posix_ipc.unlink_shared_memory(self.name)
        except posix_ipc.ExistentialError:
            pass

    def close(self) -> None:
        """Gives up the lock. The mapping goes with the last reference. Idempotent."""
        if self._memory.fd >= 0:
            # Explicitly: the mapping holds the open file, and with it the lock, for as long as it lives.
            fcntl.flock(self._memory.fd, fcntl.LOCK_UN)
            self._memory.close_fd()

    def __enter__(self) -> StatsPage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(name: str, *, writable: bool = True) -> posix_ipc.SharedMemory:
    try:
        return posix_ipc.SharedMemory(name, read_only=not writable)
    except posix_ipc.ExistentialError as error:
        raise FileNotFoundError(f"no stats page {name}: the server that wrote it has ended") from error
    except posix_ipc.PermissionsError as error:
        raise PermissionError(f"stats page {name} belongs to another user") from error
    except (OSError, ValueError) as error:  # ELOOP, EINVAL
        raise FileNotFoundError(f"{name} is no shared memory") from error


def _lock(memory: posix_ipc.SharedMemory) -> bool:
    """Takes the writers' shared lock. False: sweep_stale() removed the page in between, and it is closed here."""
    fcntl.flock(memory.fd, fcntl.LOCK_SH)
    if os.fstat(memory.fd).st_nlink > 0:
        return True
    memory.close_fd()
    return False


def _construct(memory: posix_ipc.SharedMemory, role: int, index: int, *, writable: bool) -> StatsPage:
    try:
        return StatsPage(memory, role, index, writable)
    except BaseException:
        memory.close_fd()
        raise


class StatsSums:
    """Word-wise sums over pages, taken at one moment."""

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._words = words

    @property
    def words(self) -> npt.NDArray[np.uint64]:
        """All of them, in the table's order."""
        return self._words

    def __getitem__(self, name: str) -> int:
        """A counter or gauge (of an array: its first element)."""
        return int(self._words[WORD_INDEX[name]])

    def array(self, name: str) -> npt.NDArray[np.uint64]:
        """All elements of a counter array."""
        row = STATS_TABLE[STAT_INDEX[name]]
        return self._words[row.first_word : row.first_word + row.instances]

    def histogram(self, name: str, instance: int = 0) -> Histogram:
        row = STATS_TABLE[STAT_INDEX[name]]
        start = row.first_word + instance * row.words
        total, *buckets = self._words[start : start + row.words].tolist()
        return Histogram(row.bounds, tuple(buckets), total / row.scale)

    def as_dict(self) -> dict[str, int | list[int] | Histogram | list[Histogram]]:
        """Everything, by name; arrays and histograms with several instances as lists."""
        values: dict[str, int | list[int] | Histogram | list[Histogram]] = {}
        for row in STATS_TABLE:
            if row.kind == "h":
                instances = [self.histogram(row.name, i) for i in range(row.instances)]
                values[row.name] = instances if row.instances > 1 else instances[0]
            else:
                values[row.name] = self.array(row.name).tolist() if row.instances > 1 else self[row.name]
        return values


def read_sums(pages: Sequence[_core.StatsMap]) -> StatsSums:
    """The sum of every counter, gauge and histogram over the pages; one native pass."""
    return StatsSums(_core.sum_pages(list(pages)))


@dataclass(frozen=True, slots=True)
class RingStats:
    """One ring of one channel, its writer's and its reader's counters put together."""

    frontend: int
    engine: int
    ring: str  # "req" or "out"
    used_bytes: int
    capacity_bytes: int
    frames: int
    records: int
    full: int
    doorbells_sent: int
    doorbells_suppressed: int
    received_frames: int
    received_records: int
    sleeps: int
    hop: Histogram


def _ring(frontend: int, engine: int, ring: str, writer: _core.ChannelStats, reader: _core.ChannelStats) -> RingStats:
    same = writer["connection_generation"] == reader["connection_generation"] != 0
    hop = Histogram(_core.HOP_BOUNDS, tuple(reader["hop_buckets"]), reader["hop_sum_ns"] / 1e9)
    return RingStats(
        frontend=frontend,
        engine=engine,
        ring=ring,
        used_bytes=max(0, writer["sent_position"] - reader["received_position"]) if same else 0,
        capacity_bytes=writer["sent_capacity"],
        frames=writer["sent_frames"],
        records=writer["sent_records"],
        full=writer["sent_full"],
        doorbells_sent=writer["doorbells_sent"],
        doorbells_suppressed=writer["doorbells_suppressed"],
        received_frames=reader["received_frames"],
        received_records=reader["received_records"],
        sleeps=reader["sleeps"],
        hop=hop,
    )


def read_rings(pages: Iterable[_core.StatsMap]) -> list[RingStats]:
    """Both rings of every channel between the front-end and engine pages given."""
    pages = list(pages)
    engines = [page for page in pages if page.role == Role.ENGINE]
    rings = []
    for frontend in (page for page in pages if page.role == Role.FRONTEND):
        for engine in engines:
            near, far = frontend.channel(engine.index), engine.channel(frontend.index)
            rings.append(_ring(frontend.index, engine.index, "req", near, far))
            rings.append(_ring(frontend.index, engine.index, "out", far, near))
    return rings


def list_pages(prefix: str = "/" + _PREFIX) -> list[PageName]:
    """Names of the stats pages on this machine that begin with `prefix`, whoever's they are."""
    names = (parse_page_name(path.name) for path in sorted(_SHM.glob(prefix.removeprefix("/") + "*")))
    return [name for name in names if name is not None]


def sweep_stale(prefix: str = "/" + _PREFIX) -> list[str]:
    """Removes the pages that no process has open for writing; returns their names.

    What belongs to another user, or is no page but has the name of one, is left alone.
    """
    removed = []
    for page in list_pages(prefix):
        try:
            memory = posix_ipc.SharedMemory(page.name)
        except (posix_ipc.Error, OSError, ValueError):
            continue  # gone, another user's, or no shared memory but a directory or a link of that name
        try:
            if os.fstat(memory.fd).st_uid != os.geteuid():
                continue
            fcntl.flock(memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            posix_ipc.unlink_shared_memory(page.name)
            removed.append(page.name)
        except (posix_ipc.Error, OSError):
            continue
        finally:
            memory.close_fd()
    return removed
