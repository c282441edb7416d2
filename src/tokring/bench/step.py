"""What the engine adds to a model: µs per step for receive, schedule, build inputs, sample bookkeeping and publish.

Real rings (both ends in this process), real scheduler, prefix cache and sampling columns; the runner returns logits
without computing any, and the sampling kernel is replaced by a constant.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.core import EngineCore
from tokring.engine.engine_config import EngineConfig
from tokring.engine.step_batch import StepBatch
from tokring.engine.step_stats import StepStats
from tokring_ipc import REQUEST_DTYPE, EngineChannel, FrontEndChannel, StepPhase

VOCAB_SIZE = 32_000
PROMPT_TOKENS = 64
BLOCK_SIZE = 16
BATCHES = (1, 64, 256, 1024)
SETTLE_STEPS = 20
_NUM_STREAM_SLOTS = 8192
_SAMPLED_TOKEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`num_running` requests decode. Churn: at each step one joins, one leaves, and some cross blocks."""

    num_running: int
    churn: bool
    num_steps: int

    @property
    def lifetime(self) -> int:
        """Output tokens of a request."""
        return max(self.num_running, 64) if self.churn else self.num_steps + 200

    @property
    def max_model_len(self) -> int:
        """Room for the longest request."""
        return PROMPT_TOKENS + 2 * self.lifetime

    @property
    def num_blocks(self) -> int:
        """Enough for all who run; content of those who left is evicted all the time."""
        return (self.num_running + 64) * (self.max_model_len // BLOCK_SIZE + 2)

    @property
    def max_num_batched_tokens(self) -> int:
        """All prompts of the start fit into one step."""
        return self.num_running * PROMPT_TOKENS + 512

    def first_lifetimes(self) -> list[int]:
        """Output tokens of those that run from the start: with churn, one after the other ends."""
        if not self.churn:
            return [self.lifetime] * self.num_running
        return [SETTLE_STEPS + index * self.lifetime // self.num_running for index in range(self.num_running)]

    def joins(self, num_running: int) -> bool:
        """Whether another request joins at a step at which so many run."""
        return self.churn and num_running <= self.num_running


class NullRunner:
    """Costs nothing: the same zeros every step."""

    name = "null"
    is_invariant = True
    is_asynchronous: Literal[False] = False
    vocab_size = VOCAB_SIZE

    def __init__(self, max_logits: int) -> None:
        self._logits = np.zeros((max_logits, 8), np.float32)

    def kv_bytes_per_block(self) -> int:
        return 1

    def allocate_kv_cache(self, num_blocks: int) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def execute(self, batch: StepBatch) -> NDArray[np.float32]:
        return self._logits[: len(batch.logits_index)]


@contextmanager
def constant_sampling() -> Iterator[None]:
    """In place of the sampling kernel, whose cost is the vocabulary's: one token that is no stop id."""

    def sample(*columns: Any, **options: Any) -> None:
        columns[8].fill(_SAMPLED_TOKEN)  # out_token
        columns[9].fill(True)  # finite

    real, tokring_kernels.sample = tokring_kernels.sample, sample
    try:
        yield
    finally:
        tokring_kernels.sample = real


@contextmanager
def connected() -> Iterator[tuple[FrontEndChannel, EngineChannel]]:
    """Both ends of one channel."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    req_read, req_write = os.pipe2(os.O_NONBLOCK)
    out_read, out_write = os.pipe2(os.O_NONBLOCK)
    accepted: list[EngineChannel] = []
    thread = threading.Thread(target=lambda: accepted.append(EngineChannel.accept(far, req_read, out_write)))
    thread.start()
    front_end = FrontEndChannel.connect(
        near, req_write, out_read, out_bytes=1 << 22, num_stream_slots=_NUM_STREAM_SLOTS
    )
    thread.join()
    with front_end, accepted[0]:
        yield front_end, accepted[0]
    for fd in (req_read, req_write, out_read, out_write):
        os.close(fd)
    near.close()
    far.close()


def plain_record(stream_slot: int, slot_generation: int, max_tokens: int) -> NDArray[np.void]:
    """REQUEST_DTYPE[1] of a request that asks for nothing special."""
    record = np.zeros(1, REQUEST_DTYPE)
    for name, value in {
        "stream_slot": stream_slot, "slot_generation": slot_generation, "parent_slot": 0xFFFFFFFF,
        "max_tokens": max_tokens, "num_logprobs": -1, "num_prompt_logprobs": -1, "temperature": 0.7, "top_p": 0.9,
        "repetition_penalty": 1.0,
    }.items():  # fmt: skip
        record[name] = value
    return record


class Client:
    """Submits requests of a given output length and swallows what comes back."""

    def __init__(self, channel: FrontEndChannel) -> None:
        self._channel = channel
        self._random = np.random.default_rng(0)
        self._free = list(range(_NUM_STREAM_SLOTS - 1, -1, -1))
        self._generation = 0

    def submit(self, max_tokens: int) -> None:
        self._generation += 1
        record = plain_record(self._free.pop(), self._generation, max_tokens)
        record["num_stop_ids"], record["stop_ids"][:, :2] = 2, (31_000, 31_001)
        ids = self._random.integers(0, VOCAB_SIZE, PROMPT_TOKENS, dtype=np.int32)
        if not self._channel.submit(record, ids):
            raise RuntimeError("the request ring is full: the benchmark submits faster than the engine takes")

    def drain(self) -> None:
        while (frame := self._channel.poll()) is not None:
            if len(frame.finish):
                self._free += frame.finish["stream_slot"].tolist()
            del frame  # its views would die in release()
        self._channel.release()


class StepMeter(StepStats):
    """Times the phases, and within schedule how long the batch's arrays take to build."""

    def __init__(self) -> None:
        super().__init__()
        self.build_ns = 0

    def watch(self, core: EngineCore) -> None:
        builder = core.scheduler.builder
        build = builder.build

        def timed() -> StepBatch | None:
            start_ns = time.monotonic_ns()
            batch = build()
            self.build_ns = time.monotonic_ns() - start_ns
            return batch

        builder.build = timed  # type: ignore[method-assign]


PHASES = ("receive", "schedule", "build", "sample", "publish")


def measure(load: Workload) -> dict[str, Any]:
    """µs per step: median of each phase, p50 and p99 of their sum."""
    config = EngineConfig(
        vocab_size=VOCAB_SIZE,
        max_model_len=load.max_model_len,
        num_blocks=load.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=load.num_running + 1,
        max_num_batched_tokens=load.max_num_batched_tokens,
        max_intake_per_step=load.num_running,
    )
    with connected() as (near, far), constant_sampling():
        meter = StepMeter()
        core = EngineCore(config, NullRunner(load.num_running + 512), meter)
        meter.watch(core)
        core.attach(0, far)
        client = Client(near)
        for lifetime in load.first_lifetimes():
            client.submit(lifetime)
        times = np.zeros((load.num_steps, len(PHASES)))
        running, cpu_ns = np.zeros(load.num_steps), np.zeros(load.num_steps)
        gc.collect()
        for step in range(-2 * SETTLE_STEPS, load.num_steps):
            client.drain()
            if step >= -SETTLE_STEPS and load.joins(core.scheduler.columns.num_rows):
                client.submit(load.lifetime)
            start_ns = time.thread_time_ns()
            core.step()
            if step >= 0:
                cpu_ns[step] = time.thread_time_ns() - start_ns
                phase_ns = meter.phase_ns
                schedule_ns = phase_ns[StepPhase.SCHEDULE] - meter.build_ns
                times[step] = (
                    phase_ns[StepPhase.RECEIVE], schedule_ns, meter.build_ns, phase_ns[StepPhase.SAMPLE],
                    phase_ns[StepPhase.PUBLISH],
                )  # fmt: skip
                running[step] = core.scheduler.columns.num_rows
    return summary("tokring", load, times, cpu_ns, running, PHASES)


def summary(
    engine: str,
    load: Workload,
    times_ns: NDArray[np.float64],
    cpu_ns: NDArray[np.float64],
    running: NDArray[np.float64],
    phases: tuple[str, ...],
) -> dict[str, Any]:
    """A row of the report from times_ns[steps, phases] and the thread's CPU time of each step."""
    total = times_ns.sum(axis=1)
    return {
        "engine": engine,
        "load": "churn" if load.churn else "steady",
        "batch": load.num_running,
        "running": round(float(running.mean()), 1),
        "p50_us": _us(np.median(total)),
        "cpu_us": _us(np.median(cpu_ns)),
        "p99_us": _us(np.percentile(total, 99)),
        "phases_us": {name: _us(np.median(times_ns[:, i])) for i, name in enumerate(phases)},
    }


def _us(ns: Any) -> float:
    return round(float(ns) / 1e3, 1)
