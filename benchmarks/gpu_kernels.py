"""Attention kernels on a GPU: decode bandwidth beside the measured copy bandwidth, prefill TFLOP/s beside a GEMM.

    python benchmarks/gpu_kernels.py [--quick] [--json FILE]

Decode rows give KV bytes read per second and their share of what a device-to-device copy moves (bytes read and written
both count) in the same run; caches below the L2's size stay in it between replays. Prefill rows give causal TFLOP/s
(4 x pairs x head_dim x heads) and their share of a bf16 GEMM's, on Hopper by both kernels. Times are medians of CUDA
events. Without a GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tokring.engine.cuda.device import DRIVER_LIBRARY, NoCuda, check_driver, check_packages, check_torch, read_driver
from tokring_kernels.cuda.attention import AttentionShape, KvFormat, decode_workspace_bytes, paged_decode, paged_prefill

BLOCK = 16
DECODE = (  # rows, length, heads, KV heads, head_dim, KV format
    (1, 1024, 32, 8, 128, "same"),
    (1, 32768, 32, 8, 128, "same"),
    (8, 4096, 32, 8, 128, "same"),
    (64, 1024, 32, 8, 128, "same"),
    (64, 4096, 32, 8, 128, "same"),
    (256, 4096, 32, 8, 128, "same"),
    (64, 4096, 32, 8, 128, "fp8"),
    (64, 4096, 32, 8, 128, "int8"),
    (256, 1024, 9, 3, 64, "same"),
)
PREFILL = ((1, 512, 0), (1, 4096, 0), (1, 16384, 0), (4, 4096, 0), (1, 2048, 14336))  # runs, tokens, cached before


def seconds(call: Callable[[], object], repetitions: int) -> float:
    """Median time on the GPU, after two calls to warm up."""
    import torch

    times = []
    for repetition in range(repetitions + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if repetition >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


class Cache:
    """Random keys and values of `rows` sequences in shuffled blocks."""

    def __init__(self, rows: int, length: int, shape: AttentionShape) -> None:
        import torch

        self.width = -(-length // BLOCK)
        num_blocks = rows * self.width
        size = (num_blocks, shape.num_kv_heads, BLOCK, shape.head_dim)
        if shape.kv_format == "same":
            self.keys, self.values = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        else:  # codes up to 63: finite in both formats
            self.keys, self.values = (torch.randint(0, 63, size, device="cuda", dtype=torch.uint8) for _ in range(2))
        self.scales = torch.full(size[:3], 0.01, device="cuda", dtype=torch.float32)
        ids = torch.randperm(num_blocks, device="cuda").to(torch.int32)
        self.block_table = ids.reshape(rows, self.width).contiguous()
        self.lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)

    def arguments(self) -> dict[str, int]:
        return {
            "key_cache": self.keys.data_ptr(),
            "value_cache": self.values.data_ptr(),
            "key_scale": self.scales.data_ptr(),
            "value_scale": self.scales.data_ptr(),
            "block_table": self.block_table.data_ptr(),
            "lengths": self.lengths.data_ptr(),
            "table_width": self.width,
        }


def decode_row(device: Any, case: tuple[int, int, int, int, int, KvFormat], repetitions: int) -> dict[str, Any]:
    import torch

    rows, length, num_heads, num_kv_heads, head_dim, kv_format = case
    shape = AttentionShape(
        element="Bf16", head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, kv_format=kv_format
    )
    cache = Cache(rows, length, shape)
    query = torch.randn(rows, num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)
    processors = device.num_multiprocessors
    workspace = torch.zeros(decode_workspace_bytes(shape, rows, processors), device="cuda", dtype=torch.uint8)

    def decode() -> None:
        paged_decode(
            device.launcher,
            shape,
            out=out.data_ptr(),
            query=query.data_ptr(),
            workspace=workspace.data_ptr(),
            num_rows=rows,
            scale=head_dim**-0.5,
            num_multiprocessors=processors,
            **cache.arguments(),
        )

    num_bytes = 2 * cache.keys.nbytes + (0 if kv_format == "same" else 2 * cache.scales.nbytes)
    source = torch.empty(max(num_bytes, 256 << 20) // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    copy_rate = 2 * source.nbytes / seconds(lambda: target.copy_(source), repetitions)
    took = seconds(graph.replay, repetitions)
    return {
        "kernel": "decode",
        "case": f"{rows} x {length}, {num_heads}/{num_kv_heads} heads x {head_dim}, {kv_format}",
        "us": round(took * 1e6, 1),
        "KV MB": round(num_bytes / 1e6, 1),
        "rate": f"{num_bytes / took / 1e9:.0f} GB/s",
        "rival": f"copy {copy_rate / 1e9:.0f} GB/s",
        "share": round(num_bytes / took / copy_rate, 3),
    }


def prefill_row(device: Any, case: tuple[int, int, int], repetitions: int, warpgroups: bool = False) -> dict[str, Any]:
    import torch

    runs, tokens, before = case
    shape = AttentionShape(element="Bf16", head_dim=128, num_heads=32, num_kv_heads=8)
    cache = Cache(runs, before + tokens, shape)
    query = torch.randn(runs * tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)
    starts = torch.arange(runs + 1, device="cuda", dtype=torch.int32) * tokens

    def prefill() -> None:
        paged_prefill(
            device.launcher,
            shape,
            out=out.data_ptr(),
            query=query.data_ptr(),
            query_starts=starts.data_ptr(),
            num_sequences=runs,
            longest_run=tokens,
            scale=128**-0.5,
            warpgroups=warpgroups,
            **cache.arguments(),
        )

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm = 2 * 8192**3 / seconds(lambda: a @ b, repetitions)
    took = seconds(prefill, repetitions)
    pairs = tokens * before + tokens * (tokens + 1) // 2
    flops = 4 * runs * pairs * 128 * 32 / took
    return {
        "kernel": "prefill by wgmma" if warpgroups else "prefill",
        "case": f"{runs} x {tokens} after {before}, 32/8 heads x 128",
        "us": round(took * 1e6, 1),
        "KV MB": round(2 * cache.keys.nbytes / 1e6, 1),
        "rate": f"{flops / 1e12:.0f} TFLOP/s",
        "rival": f"GEMM {gemm / 1e12:.0f} TFLOP/s",
        "share": round(flops / gemm, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args()
    try:
        driver = read_driver(DRIVER_LIBRARY)
        check_driver(driver)
        check_packages(driver)
        check_torch()
    except NoCuda as reason:
        print(f"not run: no GPU: {reason}")
        return 0
    import torch

    from tokring.engine.cuda.torch_device import CudaDevice

    device, repetitions = CudaDevice(), 10 if arguments.quick else 50
    print(torch.cuda.get_device_name())
    rows = []
    kernels: list[tuple[Any, Any]] = [(decode_row, DECODE), (prefill_row, PREFILL)]
    if device.has_warpgroups:
        kernels.append((partial(prefill_row, warpgroups=True), PREFILL))
    for measure, cases in kernels:
        for case in cases:
            rows.append(measure(device, case, repetitions))
            row = rows[-1]
            print(
                f"{row['kernel']:16} {row['case']:44} {row['us']:9} us {row['KV MB']:8} MB {row['rate']:>13} "
                f"{row['rival']:>18} {row['share']:6}",
                flush=True,
            )
    if arguments.json:
        path = Path(arguments.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"on": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
