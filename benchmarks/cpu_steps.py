"""Whole steps of a model on the CPU, beside what the machine can do in the same run.

    python -m benchmarks.cpu_steps [--model PATH] [--threads N] [--activation-bits 8|15] [--seconds S] [--json]

One native call per step, as the engine makes it: decode at 1, 8 and 32 rows with 192 tokens of context, prompts of 128
and 512 tokens in one chunk. Each round takes one step, its linear layers alone, a pass over as many bytes as the step
must read, and a float32 GEMM of numpy (OpenBLAS), all in as many threads; times are medians over the rounds.

`linear`: time of the linear layers over the step's; at one row above 100 %, for here each is a call of its own.
`read`: the share of its bound, packed weights and KV bytes at the rate of that pass, that the step reaches, and the
linear layers with the weights alone. Gmac/s counts the linear layers over their own time, `x sgemm` is that over the
rate of numpy's GEMM, the last column the same for the whole step.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its own threads would not be the ones counted here

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.bench.machine import describe_host
from tokring.checkpoint import Checkpoint, open_checkpoint
from tokring.engine.cpu_runner import BLOCK_SIZE, CpuRunner
from tokring.engine.cpu_threads import default_cpu_threads
from tokring.engine.step_batch import StepBatch
from tokring.models.linear import Linear, NativeLinear
from tokring_kernels import PackedLinear

CONTEXT = 192
GEMM_SIZE = 512


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_requests: int
    new_tokens: int  # of each request
    context: int  # of each, the new ones included

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.new_tokens

    @property
    def blocks_each(self) -> int:
        return -(-self.context // BLOCK_SIZE)


CASES = (
    *(Case(f"decode {rows} x {CONTEXT}", rows, 1, CONTEXT) for rows in (1, 8, 32)),
    *(Case(f"prompt of {tokens}", 1, tokens, tokens) for tokens in (128, 512)),
)


@dataclass(frozen=True, slots=True)
class Shares:
    case: str
    step_ms: float
    tokens_per_s: float
    linear_share: float
    step_read_share: float
    linear_read_share: float
    read_gb_s: float
    linear_gmac_s: float
    linear_to_sgemm: float
    step_to_sgemm: float


def batch_of(case: Case, vocab_size: int) -> StepBatch:
    """The step that computes the last `new_tokens` of each request, whose logits are wanted of the last one."""
    n, first = case.num_requests, case.context - case.new_tokens
    indices = np.arange(n, dtype=np.int32)
    positions = np.tile(np.arange(first, case.context, dtype=np.int32), n)
    query_start = np.arange(n + 1, dtype=np.int32) * np.int32(case.new_tokens)
    first_slot = np.repeat(np.arange(n, dtype=np.int64), case.new_tokens) * case.blocks_each * BLOCK_SIZE
    return StepBatch(
        rows=indices,
        num_scheduled=np.full(n, case.new_tokens, np.int32),
        num_computed=np.full(n, first, np.int32),
        query_start=query_start,
        token_ids=np.random.default_rng(0).integers(0, vocab_size, case.num_tokens, dtype=np.int32),
        positions=positions,
        slot_mapping=first_slot + positions,
        seq_lens=np.full(n, case.context, np.int32),
        block_table=np.arange(n * case.blocks_each, dtype=np.int32).reshape(n, -1),
        sample_index=indices,
        logits_index=query_start[1:] - 1,
    )


def matrices_of(*linears: Linear) -> list[PackedLinear]:
    return [matrix for linear in linears if isinstance(linear, NativeLinear) for matrix in linear.matrices]


class Model:
    """A runner and its matrices."""

    def __init__(self, checkpoint: Checkpoint, activation_bits: int) -> None:
        self.runner = CpuRunner(
            checkpoint,
            dtype="auto",
            max_model_len=max(case.context for case in CASES),
            max_num_batched_tokens=max(case.num_tokens for case in CASES),
            activation_bits=8 if activation_bits == 8 else 15,
        )
        self.runner.allocate_kv_cache(max(case.num_requests * case.blocks_each for case in CASES))
        self.activation_bits = activation_bits
        decoder = self.runner._decoder
        self.body: list[PackedLinear] = []
        for layer in decoder.layers:
            attention, mlp = layer.attention, layer.mlp
            self.body += matrices_of(attention.qkv, attention.output, mlp.gate_up, mlp.down)
        self.head = matrices_of(decoder.head)

    def linears(self, case: Case) -> Callable[[], None]:
        """Applies each matrix to as many rows as in a step."""
        calls: list[tuple[PackedLinear, NDArray[np.float32], NDArray[np.float32]]] = []
        buffers: dict[tuple[int, int], NDArray[np.float32]] = {}
        for matrices, rows in ((self.body, case.num_tokens), (self.head, case.num_requests)):
            for matrix in matrices:
                x, out = (
                    buffers.setdefault((rows, width), np.full((rows, width), 0.5, np.float32))
                    for width in (matrix.inputs, matrix.outputs)
                )
                calls.append((matrix, x, out if out is not x else np.empty_like(x)))

        def run() -> None:
            for matrix, x, out in calls:
                matrix.apply(x, out, activation_bits=self.activation_bits)

        return run

    def macs(self, case: Case) -> int:
        """Multiplications of the linear layers."""
        sizes = (sum(matrix.outputs * matrix.inputs for matrix in matrices) for matrices in (self.body, self.head))
        return int(np.dot(list(sizes), (case.num_tokens, case.num_requests)))

    def weight_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in (*self.body, *self.head))

    def kv_bytes(self, case: Case) -> int:
        return case.num_requests * case.blocks_each * self.runner.kv_bytes_per_block()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(model: Model, case: Case, pool: ThreadPoolExecutor, threads: int, budget_s: float) -> Shares:
    """Rounds until the budget is spent, three at least."""
    batch = batch_of(case, model.runner.vocab_size)
    linears = model.linears(case)
    weights, kv = model.weight_bytes(), model.kv_bytes(case)
    memory = np.ones((weights + kv) // 8, np.int64)
    squares = np.ones((threads, 2, GEMM_SIZE, GEMM_SIZE), np.float32)

    def multiply() -> None:
        list(pool.map(lambda pair: pair[0] @ pair[1], squares))

    calls = (lambda: model.runner.execute(batch), linears, lambda: tokring_kernels.xor_words(memory), multiply)
    for call in calls:
        call()
    end = time.perf_counter() + budget_s
    rounds: list[list[float]] = []
    while len(rounds) < 3 or time.perf_counter() < end:
        rounds.append([seconds(call) for call in calls])
    step, linear, reading, multiplying = np.median(rounds, axis=0).tolist()
    rate = memory.nbytes / reading
    macs = model.macs(case)
    sgemm = threads * GEMM_SIZE**3 / multiplying
    return Shares(
        case=case.name,
        step_ms=step * 1e3,
        tokens_per_s=case.num_tokens / step,
        linear_share=linear / step,
        step_read_share=(weights + kv) / rate / step,
        linear_read_share=weights / rate / linear,
        read_gb_s=rate / 1e9,
        linear_gmac_s=macs / linear / 1e9,
        linear_to_sgemm=macs / linear / sgemm,
        step_to_sgemm=macs / step / sgemm,
    )


def table(rows: Iterator[Shares]) -> Iterator[str]:
    yield (
        f"{'case':16} {'step ms':>8} {'tokens/s':>9} {'linear':>7} "
        f"{'read: step':>11} {'linear':>7} {'Gmac/s':>7} {'x sgemm':>8} {'step':>6}"
    )
    for row in rows:
        yield (
            f"{row.case:16} {row.step_ms:8.2f} {row.tokens_per_s:9.0f} {row.linear_share:7.0%} "
            f"{row.step_read_share:11.0%} {row.linear_read_share:7.0%} {row.linear_gmac_s:7.1f} "
            f"{row.linear_to_sgemm:8.2f} {row.step_to_sgemm:6.2f}   ({row.read_gb_s:.1f} GB/s read)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_steps", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a GGUF or Hugging Face directory (default: the embedded model)")
    parser.add_argument("--threads", type=int, default=default_cpu_threads())
    parser.add_argument("--activation-bits", type=int, choices=(8, 15), default=15)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each case")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    arguments = parser.parse_args()
    tokring_kernels.set_num_threads(arguments.threads)
    model = Model(open_checkpoint(arguments.model), arguments.activation_bits)
    with ThreadPoolExecutor(arguments.threads) as pool:
        rows = (measure(model, case, pool, arguments.threads, arguments.seconds) for case in CASES)
        if arguments.json:
            print(json.dumps(describe_host() | {"threads": arguments.threads, "level": tokring_kernels.level()}))
            for row in rows:
                print(json.dumps(asdict(row)), flush=True)
            return
        print(
            f"level {tokring_kernels.level()}, {arguments.threads} threads, {arguments.activation_bits}-bit activations"
        )
        for line in table(rows):
            print(line, flush=True)


if __name__ == "__main__":
    main()
