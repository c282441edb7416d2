"""run_pair: one run of one transport between two forked, pinned processes."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokring.bench import _native
from tokring.bench.board import Board, Word
from tokring.bench.case import Regime
from tokring.bench.track import ReaderTrack, WriterTrack
from tokring.bench.transports.base import Transport
from tokring.bench.usage import Usage, busy_ms

DEADLINE_S = 60.0
REALTIME_PRIORITY = 10


class BenchError(Exception):
    """A run did not come to its end: which one, and what its process said."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How runs are made. `cores`: writer's and reader's. `realtime`: SCHED_RR, so that little else interferes."""

    cores: tuple[int, int]
    realtime: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Of the measured steps only, the warm-up left out."""

    one_way_ns: npt.NDArray[np.int64]
    wall_ns: int
    writer: dict[str, int]  # usage and counters
    reader: dict[str, int]
    foreign_ms: float  # taken from the two cores by others; one run's figure is off by some ticks, up or down
    core_ms: float  # of both cores together, the processes' start and end included


def run_pair(transport: Transport, regime: Regime, num_steps: int, setup: Setup) -> Run:
    """Sends `num_steps` payloads and a fifth more to warm up. Raises BenchError."""
    pair = Pair(transport, regime, num_steps, setup)
    writer, reader = pair.run()
    board, first = pair.board, pair.warm_up
    one_way = board.delivered[first:].astype(np.int64) - board.sent[first:].astype(np.int64)
    wall_ns = int(board.delivered[-1] - board.delivered[first - 1])
    if not regime.closed:
        # An event loop may take in everything before it hands out the first: only the whole stream has a rate.
        wall_ns = int(board.delivered[-1] - board.sent[0]) * num_steps // board.num_steps
    return Run(one_way, wall_ns, writer, reader, pair.foreign_ms, pair.core_ms)


def count_syscalls(transport: Transport, regime: Regime, num_steps: int, setup: Setup) -> tuple[float, float] | None:
    """System calls per step of writer and reader, counted in a run of its own; None where ptrace is not allowed."""
    ordinary = replace(setup, realtime=False)  # a spinning real-time process would keep its tracer from running
    pair = Pair(transport, regime, num_steps, ordinary, traced=True)
    pair.run()
    if pair.syscalls is None:
        return None
    return pair.syscalls[0] / num_steps, pair.syscalls[1] / num_steps


class Pair:
    """The two processes of a run; the parent only watches."""

    def __init__(
        self, transport: Transport, regime: Regime, num_steps: int, setup: Setup, *, traced: bool = False
    ) -> None:
        self.transport = transport
        self.regime = regime
        self.warm_up = max(2, num_steps // 5)
        self.board = Board(self.warm_up + num_steps)
        self.syscalls: tuple[int, int] | None = None
        self._setup = setup
        self._traced = traced
        self.foreign_ms = self.core_ms = 0.0

    def run(self) -> tuple[dict[str, int], dict[str, int]]:
        busy, watched, start_ns = busy_ms(self._setup.cores), time.process_time_ns(), time.monotonic_ns()
        writer = ChildProcess(self._write, self._setup, self._setup.cores[0], group=0)
        reader = ChildProcess(self._read, self._setup, self._setup.cores[1], group=writer.pid)
        self.transport.close()
        try:
            self._let_go(writer, reader)
            results = collect([writer, reader])
        except BenchError as error:
            raise BenchError(
                f"{self.transport.label}, {self.regime.name}, {self.transport.payload.case}: {error}"
            ) from None
        finally:
            writer.end()
            reader.end()
        # From before the forks until both are reaped, so that all that they cost is known, their end included.
        own_ms = writer.cpu_ms + reader.cpu_ms + (time.process_time_ns() - watched) / 1e6
        self.foreign_ms = busy_ms(self._setup.cores) - busy - own_ms
        self.core_ms = 2 * (time.monotonic_ns() - start_ns) / 1e6
        return results[0], results[1]

    def _let_go(self, writer: ChildProcess, reader: ChildProcess) -> None:
        board = self.board
        go = board.word(Word.GO)
        if not self._traced:
            go[0] = 1
            return
        try:
            counter = _native.SyscallCounter(writer.pid, reader.pid)
        except RuntimeError:
            go[0] = 1
            return
        go[0] = 1
        self.syscalls = counter.run(board.word(Word.WRITER_MEASURES), board.word(Word.READER_MEASURES))

    def _write(self) -> dict[str, int]:
        board, transport = self.board, self.transport
        board.sleep_until(Word.GO)
        transport.open_writer()
        board.sleep_until(Word.READER_READY)
        track = WriterTrack(board)
        transport.write(track, self.regime.warm_up(), 0, self.warm_up)
        counters, waited, start = transport.counters(), track.waited_ns, Usage.now()
        board.word(Word.WRITER_MEASURES)[0] = 1
        transport.write(track, self.regime, self.warm_up, board.num_steps)
        board.word(Word.WRITER_MEASURES)[0] = 0
        used = Usage.now().since(start)
        used["cpu_ns"] -= track.waited_ns - waited
        counted = {name: value - counters[name] for name, value in transport.counters().items()}
        _native.yield_until(board.acknowledged, board.num_steps)
        return used | counted

    def _read(self) -> dict[str, int]:
        board, transport = self.board, self.transport
        board.sleep_until(Word.GO)
        transport.open_reader()
        track = ReaderTrack(board, self.warm_up, self._verify)
        track.ready()
        transport.read(track)
        return track.measured

    def _verify(self, delivered: Any) -> None:
        if self.transport.rows(delivered) != self.transport.payload.rows():
            raise BenchError("what arrived is not what was sent")


class ChildProcess:
    """A forked process pinned to one core; tells its result, a dict, as JSON through a pipe."""

    def __init__(self, work: Callable[[], dict[str, int]], setup: Setup, core: int, group: int) -> None:
        self.cpu_ms = 0.0  # of its whole life, once it has ended
        self._result_fd, write_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._result_fd)
            _be_child(work, setup, core, write_fd)
        os.close(write_fd)
        os.setpgid(self.pid, group or self.pid)
        self.pidfd = os.pidfd_open(self.pid)

    def result(self) -> dict[str, int]:
        """After its end. Raises BenchError with its traceback."""
        text = os.read(self._result_fd, 65536)
        if not text:
            raise BenchError("a process of the run died without a word")
        told: dict[str, Any] = json.loads(text)
        if "error" in told:
            raise BenchError(told["error"])
        return told

    def end(self) -> None:
        """Kills it if it still runs, and frees what is held for it."""
        try:
            os.kill(self.pid, signal.SIGKILL)
            _, _, used = os.wait4(self.pid, 0)
            self.cpu_ms = (used.ru_utime + used.ru_stime) * 1e3
        except (ProcessLookupError, ChildProcessError):
            pass  # the syscall counter has reaped it
        os.close(self.pidfd)
        os.close(self._result_fd)


def _be_child(work: Callable[[], dict[str, int]], setup: Setup, core: int, result_fd: int) -> None:
    try:
        _native.die_with_parent()
        os.sched_setaffinity(0, {core})
        if setup.realtime:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REALTIME_PRIORITY))
        gc.disable()
        told: dict[str, Any] = {**work()}
    except BaseException:
        told = {"error": traceback.format_exc()}
    try:
        os.write(result_fd, json.dumps(told).encode())
    finally:
        os._exit(0)


def collect(children: list[ChildProcess]) -> list[dict[str, int]]:
    """Results of all, when all have ended. The first error ends the waiting: its peer may wait for ever."""
    deadline = time.monotonic() + DEADLINE_S
    results: dict[int, dict[str, int]] = {}
    running = {child.pidfd: child for child in children}
    poll = select.poll()
    for pidfd in running:
        poll.register(pidfd, select.POLLIN)
    while running:
        ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ended:
            raise BenchError(f"no end after {DEADLINE_S:.0f} s")
        for pidfd, _ in ended:
            poll.unregister(pidfd)
            results[pidfd] = running.pop(pidfd).result()
    return [results[child.pidfd] for child in children]
