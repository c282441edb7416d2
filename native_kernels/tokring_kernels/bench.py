"""Times kernels beside named rivals in the same run: `python -m tokring_kernels.bench [--quick] [--json] [OP ...]`.

Rivals: for attention numpy's sum over the same cache bytes (a read bound for one thread), for the rest the numpy
reference. Each line gives p50 and p99 over the repetitions, interleaved with the rival's, and their ratio.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring_kernels import PackedLinear, reference
from tokring_kernels.linear import WeightKind

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    call: Call
    rival_name: str
    rival: Call


@dataclass(frozen=True)
class Timing:
    op: str
    case: str
    p50_us: float
    p99_us: float
    rival: str
    rival_p50_us: float
    ratio: float  # rival / kernel: above 1 the kernel is faster


def measure(case: Case, repetitions: int) -> Timing:
    """Alternates kernel and rival; the rival, often slow, gets a tenth of the repetitions."""
    times: list[float] = []
    rival_times: list[float] = []
    case.call()
    for i in range(repetitions):
        start = time.perf_counter()
        case.call()
        times.append((time.perf_counter() - start) * 1e6)
        if i % 10 == 0:
            start = time.perf_counter()
            case.rival()
            rival_times.append((time.perf_counter() - start) * 1e6)
    p50, p99 = np.percentile(times, [50, 99])
    rival_p50 = float(np.median(rival_times))
    return Timing(case.op, case.name, float(p50), float(p99), case.rival_name, rival_p50, rival_p50 / float(p50))


def attention_cases() -> Iterator[Case]:
    for name, num_seqs, seq_len, num_tokens, heads, head_dim in (
        ("decode 1 x 512, SmolLM2 135M", 1, 512, 1, (9, 3), 64),
        ("decode 1 x 4096, SmolLM2 135M", 1, 4096, 1, (9, 3), 64),
        ("decode 32 x 512, SmolLM2 135M", 32, 512, 1, (9, 3), 64),
        ("decode 8 x 1024, Llama 8B", 8, 1024, 1, (32, 8), 128),
        ("prefill 512 of 512, SmolLM2 135M", 1, 512, 512, (9, 3), 64),
        ("prefill 512 of 2048, SmolLM2 135M", 1, 2048, 512, (9, 3), 64),
    ):
        yield attention_case(name, num_seqs, seq_len, num_tokens, heads, head_dim)


def attention_case(
    name: str, num_seqs: int, seq_len: int, num_tokens: int, heads: tuple[int, int], head_dim: int
) -> Case:
    rng = np.random.default_rng(0)
    width = -(-seq_len // 16)
    shape = (num_seqs * width, heads[1], 16, head_dim)
    keys, values = (reference.narrow(rng.normal(size=shape).astype(np.float32)) for _ in range(2))
    block_table = rng.permutation(num_seqs * width).astype(np.int32).reshape(num_seqs, width)
    query = rng.normal(size=(num_seqs * num_tokens, heads[0], head_dim)).astype(np.float32)
    query_start = np.arange(num_seqs + 1, dtype=np.int32) * np.int32(num_tokens)
    seq_lens = np.full(num_seqs, seq_len, np.int32)
    out = np.empty_like(query)

    def call() -> None:
        tokring_kernels.paged_attention(query, keys, values, block_table, query_start, seq_lens, head_dim**-0.5, out)

    def read() -> None:
        for cache in (keys, values):
            np.bitwise_or.reduce(cache.reshape(-1).view(np.uint64))

    return Case("paged_attention", name, call, "read the cache once", read)


def elementwise_cases() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 576)).astype(np.float32)
    weight, out = np.ones(576, np.float32), np.empty_like(x)
    yield Case(
        "rms_norm",
        "64 x 576",
        lambda: tokring_kernels.rms_norm(x, weight, 1e-5, out),
        "numpy",
        lambda: reference.rms_norm(x, weight, 1e-5),
    )
    gate_up, product = rng.normal(size=(64, 3072)).astype(np.float32), np.empty((64, 1536), np.float32)
    yield Case(
        "silu_mul",
        "64 x 1536",
        lambda: tokring_kernels.silu_mul(gate_up, product),
        "numpy",
        lambda: reference.silu_mul(gate_up),
    )
    heads, table = rng.normal(size=(64, 12, 64)).astype(np.float32), rng.normal(size=(512, 32)).astype(np.float32)
    positions = np.arange(64, dtype=np.int32)
    yield Case(
        "rope",
        "64 x 12 x 64",
        lambda: tokring_kernels.rope(heads, table, table, positions),
        "numpy",
        lambda: reference.rope(heads, table, table, positions),
    )
    keys, slots = rng.normal(size=(64, 3, 64)).astype(np.float32), np.arange(64, dtype=np.int64) * 3
    cache = np.zeros((20, 3, 16, 64), np.uint16)
    yield Case(
        "write_kv",
        "64 x 3 x 64 to bf16",
        lambda: tokring_kernels.write_kv(keys, keys, cache, cache, slots),
        "numpy",
        lambda: reference.write_kv(keys, keys, cache, cache, slots),
    )


STORED_TYPES = {"BF16": np.uint16, "F32": np.float32}  # others: bytes


def linear_cases() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    kinds: tuple[tuple[WeightKind, int], ...] = (("Q4_1", 20), ("Q8_0", 34), ("BF16", 64), ("F32", 128))
    for kind, block_bytes in kinds:
        n, k = 49_152, 576  # SmolLM2's head: larger than most caches, as a whole model's weights are
        rows = rng.integers(0, 60, (n, k // 32 * block_bytes), dtype=np.uint8)
        layer = PackedLinear(kind, rows.view(STORED_TYPES.get(kind, np.uint8)), k)
        for m in (1, 8, 32):
            yield linear_case(f"{kind}, {m} x {k} x {n}", layer, rng.normal(size=(m, k)).astype(np.float32))


def linear_case(name: str, layer: PackedLinear, x: NDArray[np.float32]) -> Case:
    out = np.empty((len(x), layer.outputs), np.float32)
    same_bytes = np.zeros(layer.num_bytes // 8, np.uint64)
    return Case(
        "linear",
        name,
        lambda: layer.apply(x, out),
        "read the weights once",
        lambda: np.bitwise_or.reduce(same_bytes),
    )


def sampling_cases() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for name, scale, params in (
        ("greedy", 3.0, {"temperature": 0.0}),
        ("temperature", 3.0, {}),
        ("top-p 0.9", 3.0, {"top_p": 0.9}),
        ("top-p 0.9, flat", 0.1, {"top_p": 0.9}),
        ("top-k 50, top-p 0.9", 3.0, {"top_k": 50, "top_p": 0.9}),
        ("min-p 0.05", 3.0, {"min_p": 0.05}),
    ):
        logits = (rng.normal(size=(1, 49_152)) * scale).astype(np.float32)
        yield sampling_case(f"1 x 49152, {name}", logits, params)
    logits = (rng.normal(size=(1, 49_152)) * 3).astype(np.float32)
    chosen = np.array([7], np.int32)
    yield Case(
        "logprobs",
        "1 x 49152, top 20",
        lambda: tokring_kernels.logprobs(logits, chosen, 20),
        "numpy",
        lambda: reference.logprobs(logits[0], 7, 20),
    )


def sampling_case(name: str, logits: NDArray[np.float32], params: dict[str, float]) -> Case:
    every: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    every |= {"seed": 1, "choice": 0, "position": 9}
    kinds = (np.float32, np.int32, np.float32, np.float32, np.int64, np.uint32, np.int64)
    columns: list[Any] = [np.array([value], kind) for value, kind in zip(every.values(), kinds, strict=True)]
    columns += [np.empty(1, np.int32), np.empty(1, bool)]
    return Case(
        "sample",
        name,
        lambda: tokring_kernels.sample(logits, *columns),
        "numpy, sorting",
        lambda: reference.sample(logits[0], *every.values()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tokring_kernels.bench", description=__doc__)
    parser.add_argument("op", nargs="*", help="ops to time (default: all)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    parser.add_argument("--threads", type=int, default=1, help="kernel threads (default: 1, as the rivals have)")
    arguments = parser.parse_args()
    tokring_kernels.set_num_threads(arguments.threads)
    if not arguments.json:
        print(f"level {tokring_kernels.level()}, {tokring_kernels.num_threads()} threads; times in us")
        print(f"{'op':16} {'case':36} {'p50':>9} {'p99':>9}  {'ratio':>7}  rival (p50)")
    for cases in (attention_cases, linear_cases, elementwise_cases, sampling_cases):
        for case in cases():
            if arguments.op and case.op not in arguments.op:
                continue
            timing = measure(case, 30 if arguments.quick else 300)
            if arguments.json:
                print(json.dumps(asdict(timing)))
            else:
                print(
                    f"{timing.op:16} {timing.case:36} {timing.p50_us:9.1f} {timing.p99_us:9.1f} "
                    f"{timing.ratio:7.2f}x  {timing.rival} ({timing.rival_p50_us:.0f})"
                )


if __name__ == "__main__":
    main()
