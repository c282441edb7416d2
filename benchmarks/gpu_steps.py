"""Decode steps of the whole engine on a GPU: CPU time to launch one, time between tokens, how long the GPU idles.

    python benchmarks/gpu_steps.py [--model PATH] [--quick] [--vllm] [--json FILE]

Rows by number of running requests. `launch` is the CPU time of CudaRunner.launch() and collect() in a step, `step` that
of the whole EngineCore.step(), both without the wait for the GPU; `itl` the wall time of a step, one token
for each request; `gpu` the time that the GPU works on a step, measured by replaying the step's graph without a pause;
`idle` = 1 - gpu / itl. With --vllm, and where it is installed, its `bench latency` runs beside on the same model: (time
for N tokens - time for 1) / (N - 1).
Without a GPU it says so and ends with 0. A run on the emulation of tests would measure nothing and is refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tokring.bench.step import connected
from tokring.checkpoint import Checkpoint, open_checkpoint
from tokring.checkpoint.export import export
from tokring.config import Config, EngineSettings
from tokring.engine.core import EngineCore
from tokring.engine.cuda.device import NoCuda, find_cuda, is_emulated
from tokring.engine.engine_config import EngineConfig
from tokring_ipc import REQUEST_DTYPE, FrontEndChannel

BATCHES = (1, 8, 64, 256)
PROMPT_TOKENS = 128
SETTLE_STEPS = 32
BLOCK_SIZE = 16
GRAPH_REPLAYS = 50


class MeteredRunner:
    """Counts the CPU time of launches and collections, and apart from it that of waiting."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.cpu_ns = self.waiting_ns = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, *arguments: Any) -> Any:
        start = time.thread_time_ns()
        handle = self._runner.launch(*arguments)
        self.cpu_ns += time.thread_time_ns() - start
        return handle

    def collect(self, handle: Any) -> Any:
        start = time.thread_time_ns()
        handle.done.wait()
        self.waiting_ns += time.thread_time_ns() - start
        start = time.thread_time_ns()
        output = self._runner.collect(handle)
        self.cpu_ns += time.thread_time_ns() - start
        return output


def submit(channel: FrontEndChannel, count: int, vocab_size: int, max_tokens: int) -> None:
    random = np.random.default_rng(0)
    for slot in range(count):
        record = np.zeros(1, REQUEST_DTYPE)
        for name, value in {
            "stream_slot": slot, "slot_generation": 1, "parent_slot": 0xFFFFFFFF, "max_tokens": max_tokens,
            "num_logprobs": -1, "num_prompt_logprobs": -1, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.0,
            "seed": slot,
        }.items():  # fmt: skip
            record[name] = value
        ids = random.integers(0, vocab_size, PROMPT_TOKENS, dtype=np.int32)
        if not channel.submit(record, ids):
            raise RuntimeError("the request ring is full")


def drain(channel: FrontEndChannel) -> None:
    while (frame := channel.poll()) is not None:
        del frame  # its views would die in release()
    channel.release()


def measure(runner: Any, config: EngineConfig, batch: int, num_steps: int) -> dict[str, Any]:
    """One row."""
    metered = MeteredRunner(runner)
    core = EngineCore(config, metered)  # type: ignore[arg-type]
    launch_ns, step_ns, wall_ns = (np.zeros(num_steps) for _ in range(3))
    with connected() as (near, far):
        core.attach(0, far)
        submit(near, batch, config.vocab_size, SETTLE_STEPS * 4 + num_steps)
        while core.scheduler.columns.num_rows < batch or core.scheduler.waiting.num_waiting or not decodes(core):
            core.step()
            drain(near)
        for step in range(-SETTLE_STEPS, num_steps):
            metered.cpu_ns = metered.waiting_ns = 0
            cpu, wall = time.thread_time_ns(), time.monotonic_ns()
            core.step()
            if step >= 0:
                wall_ns[step] = time.monotonic_ns() - wall
                step_ns[step] = time.thread_time_ns() - cpu - metered.waiting_ns
                launch_ns[step] = metered.cpu_ns
            drain(near)
        gpu_us = graph_us(runner)
    itl_us = float(wall_ns.sum()) / num_steps / 1e3
    return {
        "batch": batch,
        "launch_cpu_us_p50": us(np.median(launch_ns)),
        "launch_cpu_us_p99": us(np.percentile(launch_ns, 99)),
        "step_cpu_us_p50": us(np.median(step_ns)),
        "itl_us_mean": round(itl_us, 1),
        "itl_us_p99": us(np.percentile(wall_ns, 99)),
        "gpu_us": round(gpu_us, 1),
        "gpu_idle": round(max(0.0, 1 - gpu_us / itl_us), 4),
    }


def decodes(core: EngineCore) -> bool:
    columns = core.scheduler.columns
    rows = slice(0, columns.num_rows)
    return bool((columns.num_computed[rows] >= columns.num_prompt[rows]).all())


def graph_us(runner: Any) -> float:
    """Time that the GPU takes for the last graph, replayed without a pause. Restores the lanes' state."""
    import torch

    saved = runner.lane_arena.clone()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    runner.last_graph.replay()
    begin.record()
    for _ in range(GRAPH_REPLAYS):
        runner.last_graph.replay()
    end.record()
    end.synchronize()
    runner.lane_arena.copy_(saved)
    return float(begin.elapsed_time(end)) * 1e3 / GRAPH_REPLAYS


def us(ns: Any) -> float:
    return round(float(ns) / 1e3, 1)


def measure_tokring(checkpoint: Checkpoint, num_steps: int) -> list[dict[str, Any]]:
    from tokring.engine.cuda.open_device import open_device
    from tokring.engine.cuda.runner import CudaRunner

    max_model_len = PROMPT_TOKENS + 4 * SETTLE_STEPS + num_steps + GRAPH_REPLAYS
    runner = CudaRunner(
        checkpoint, open_device(), max_model_len=max_model_len, max_num_seqs=max(BATCHES), max_num_batched_tokens=2048
    )
    blocks = max(BATCHES) * (-(-max_model_len // BLOCK_SIZE))
    if blocks * runner.kv_bytes_per_block() > runner.kv_memory_bytes(0.95):
        raise SystemExit(f"the GPU has no room for {blocks} KV blocks beside the model")
    runner.allocate_kv_cache(blocks)
    runner.warm_up()
    config = EngineConfig(
        vocab_size=runner.vocab_size,
        max_model_len=max_model_len,
        num_blocks=blocks,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    return [{"engine": "tokring", **measure(runner, config, batch, num_steps)} for batch in BATCHES]


def measure_vllm(checkpoint: Checkpoint, model: str | None, num_steps: int) -> list[dict[str, Any]]:
    """vLLM's own latency bench; [] with a line on standard error where it is not installed."""
    program = shutil.which("vllm")
    if program is None:
        print("vLLM is not installed: not measured", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as directory:
        path = model
        if path is None or not Path(path, "config.json").exists():
            path = str(Path(directory) / "model")
            export(checkpoint, Path(path))
        rows = []
        for batch in BATCHES:
            seconds = [vllm_latency_s(program, path, batch, length, directory) for length in (num_steps, 1)]
            itl_us = (seconds[0] - seconds[1]) / (num_steps - 1) * 1e6
            rows.append({"engine": "vllm", "batch": batch, "itl_us_mean": round(itl_us, 1)})
        return rows


def vllm_latency_s(program: str, model: str, batch: int, output_tokens: int, directory: str) -> float:
    report = Path(directory) / "latency.json"
    command = [
        program, "bench", "latency", "--model", model, "--batch-size", str(batch), "--input-len", str(PROMPT_TOKENS),
        "--output-len", str(output_tokens), "--num-iters", "5", "--output-json", str(report),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return float(json.loads(report.read_text())["avg_latency"])


def print_table(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    print("  ".join(f"{name:>17}" for name in names))
    for row in rows:
        print("  ".join(f"{row.get(name, '-'):>17}" for name in names))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="default: the small model that comes along")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM beside, where it is installed")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(arguments.model)
    try:
        if is_emulated():
            raise NoCuda("the emulation of tests says nothing about speed")
        description = find_cuda(Config(engine=EngineSettings(device="cuda")), checkpoint.config)
    except NoCuda as reason:
        print(f"not run: no GPU: {reason}")
        return 0
    num_steps = 100 if arguments.quick else 500
    rows = measure_tokring(checkpoint, num_steps)
    if arguments.vllm:
        rows += measure_vllm(checkpoint, arguments.model, num_steps)
    print(f"{checkpoint.name} on {description}")
    print_table(rows)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"model": checkpoint.name, "on": description, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
