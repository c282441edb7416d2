"""Bookkeeping of an engine step: µs for receive, schedule, sample bookkeeping and publish, without a model.

Real rings (both ends in this process), real scheduler and sampling columns; the runner returns logits without computing
any and the sampling kernel is replaced by a copy, so that what remains is what the engine adds to a model. Steady:
every row decodes, blocks fill up. Churn: besides, one request joins and one leaves per step.

    python -m benchmarks.step [--quick] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tokring.engine import sampling
from tokring.engine.core import EngineCore
from tokring.engine.engine_config import EngineConfig
from tokring.engine.step_batch import StepBatch
from tokring.engine.step_stats import StepStats
from tokring_ipc import REQUEST_DTYPE, EngineChannel, FrontEndChannel, StepPhase

VOCAB_SIZE = 32_000
PROMPT_TOKENS = 64
BATCHES = (1, 64, 256, 1024)
FILL_STEPS = 20


class NullRunner:
    """Costs nothing: the same zeros every step."""

    name = "null"
    is_invariant = True
    is_asynchronous = False
    vocab_size = VOCAB_SIZE

    def __init__(self, max_rows: int) -> None:
        self._logits = np.zeros((max_rows, 8), np.float32)

    def kv_bytes_per_block(self) -> int:
        return 1

    def allocate_kv_cache(self, num_blocks: int) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def execute(self, batch: StepBatch) -> NDArray[np.float32]:
        return self._logits[: len(batch.logits_index)]


class NullKernels:
    """In place of tokring_kernels: a token that is no stop id."""

    @staticmethod
    def sample(logits, temperature, top_k, top_p, min_p, seed, choice, position, out_token, finite):  # type: ignore[no-untyped-def]
        out_token.fill(1)
        finite.fill(True)


@contextmanager
def connected() -> Iterator[tuple[FrontEndChannel, EngineChannel]]:
    """Both ends of one channel."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    req_read, req_write = os.pipe2(os.O_NONBLOCK)
    out_read, out_write = os.pipe2(os.O_NONBLOCK)
    accepted: list[EngineChannel] = []
    thread = threading.Thread(target=lambda: accepted.append(EngineChannel.accept(far, req_read, out_write)))
    thread.start()
    front_end = FrontEndChannel.connect(near, req_write, out_read, out_bytes=1 << 22, num_stream_slots=8192)
    thread.join()
    with front_end, accepted[0]:
        yield front_end, accepted[0]
    for fd in (req_read, req_write, out_read, out_write):
        os.close(fd)
    near.close()
    far.close()


class Load:
    """Submits requests of a given output length and swallows what comes back."""

    def __init__(self, channel: FrontEndChannel) -> None:
        self._channel = channel
        self._random = np.random.default_rng(0)
        self._free = list(range(8191, -1, -1))
        self._generation = 0

    def submit(self, max_tokens: int) -> None:
        self._generation += 1
        record = np.zeros(1, REQUEST_DTYPE)
        for name, value in {
            "stream_slot": self._free.pop(), "slot_generation": self._generation, "parent_slot": 0xFFFFFFFF,
            "max_tokens": max_tokens, "num_logprobs": -1, "num_prompt_logprobs": -1, "temperature": 0.7, "top_p": 0.9,
            "repetition_penalty": 1.0, "num_stop_ids": 2, "stop_ids": [31_000, 31_001, 0, 0, 0, 0, 0, 0],
        }.items():  # fmt: skip
            record[name] = value
        assert self._channel.submit(record, self._random.integers(0, VOCAB_SIZE, PROMPT_TOKENS, dtype=np.int32))

    def drain(self) -> None:
        while (frame := self._channel.poll()) is not None:
            if len(frame.finish):
                self._free += frame.finish["stream_slot"].tolist()
            del frame
        self._channel.release()


def measure(num_running: int, num_steps: int, *, churn: bool) -> dict[str, float]:
    """Median µs by phase, and p50, p99 of the sum, over num_steps steps with num_running requests."""
    lifetime = max(num_running, 64) if churn else num_steps + 200
    max_model_len = PROMPT_TOKENS + 2 * lifetime
    config = EngineConfig(
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        num_blocks=(num_running + 64) * (max_model_len // 16 + 2),
        max_num_seqs=num_running + 1,
        max_num_batched_tokens=num_running * PROMPT_TOKENS + 512,
        max_intake_per_step=num_running,
    )
    with connected() as (near, far):
        core = EngineCore(config, NullRunner(num_running + 512), StepStats())
        core.attach(0, far)
        load = Load(near)
        for index in range(num_running):
            load.submit(FILL_STEPS + index * lifetime // num_running if churn else lifetime)
        for _ in range(FILL_STEPS):
            load.drain()
            core.step()
        times = np.zeros((num_steps, len(StepPhase)))
        gc.collect()
        for step in range(num_steps + 20):
            load.drain()
            if churn and core.scheduler.columns.num_rows < num_running + 1:
                load.submit(lifetime)
            core.step()
            if step >= 20:
                times[step - 20] = core.stats.phase_ns
        total = times.sum(axis=1) - times[:, StepPhase.EXECUTE]
        phases = {phase.name.lower(): round(float(np.median(times[:, phase])) / 1e3, 1) for phase in StepPhase}
        return phases | {
            "p50": round(float(np.median(total)) / 1e3, 1),
            "p99": round(float(np.percentile(total, 99)) / 1e3, 1),
            "running": core.scheduler.columns.num_rows,
        }


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sampling.tokring_kernels = NullKernels  # type: ignore[attr-defined]
    num_steps = 300 if arguments.quick else 2000
    results = {
        load: {str(batch): measure(batch, num_steps, churn=load == "churn") for batch in BATCHES}
        for load in ("steady", "churn")
    }
    if arguments.json:
        print(json.dumps({"bench": "step", "unit": "us", "step_us": results}))
        return
    for load, by_batch in results.items():
        for batch, row in by_batch.items():
            print(f"{load:7} {batch:>5}  " + "  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
