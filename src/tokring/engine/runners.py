"""load_runner: the backend that the configuration asks for, and the memory it leaves for the KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import tokring_kernels
from tokring.checkpoint import Checkpoint, ModelConfig
from tokring.config import Config, ConfigError, Device
from tokring.engine.cpu_runner import CpuRunner
from tokring.engine.cpu_threads import default_cpu_threads
from tokring.engine.kv_memory import available_memory_bytes, default_kv_memory_bytes
from tokring.engine.mock_runner import MockRunner
from tokring.engine.model_runner import AsynchronousRunner, ModelRunner
from tokring.engine.threaded_runner import ThreadedRunner
from tokring.speculative_config import SpeculativeConfig
from tokring_kernels.cuda.attention import KvFormat

DEFAULT_MAX_NUM_BATCHED_TOKENS: dict[Device, int] = {"cpu": 512, "cuda": 2048}
CPU_PREFILL_MACS = 12e9  # while others decode: the multiplications of a chunk that keeps them waiting 0.1 s or two
LEAST_PREFILL_TOKENS = 32  # fewer rows would not use the processor well
KV_CACHE_DTYPES: dict[Device, tuple[str, ...]] = {
    "cpu": ("auto", "bf16", "int8"),
    "cuda": ("auto", "bf16", "int8", "fp8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRunner:
    """A runner with its weights loaded."""

    runner: ModelRunner | AsynchronousRunner
    default_kv_bytes: int  # for the KV cache, unless the user says how much
    available_kv_bytes: int | None  # there can't be more; None: the backend keeps no keys and values


def max_num_batched_tokens(config: Config, device: Device) -> int:
    """--max-num-batched-tokens, or what suits the device."""
    return config.engine.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[device]


def max_num_prefill_tokens(config: Config, device: Device, model: ModelConfig) -> int:
    """--max-num-prefill-tokens, or what suits the device and the model: whole tiles of rows on the CPU."""
    budget = max_num_batched_tokens(config, device)
    if config.engine.max_num_prefill_tokens is not None:
        return config.engine.max_num_prefill_tokens
    if device == "cuda" or config.engine.engine == "mock":
        return budget
    tokens = math.ceil(CPU_PREFILL_MACS / model.num_linear_weights / LEAST_PREFILL_TOKENS) * LEAST_PREFILL_TOKENS
    return min(tokens, budget)


def check_kv_cache_dtype(config: Config, device: Device) -> None:
    """Raises ConfigError where the backend can't keep keys and values as --kv-cache-dtype says."""
    asked, known = config.engine.kv_cache_dtype, KV_CACHE_DTYPES[device]
    if config.model.dtype == "float32":
        known = ("auto",)
    if asked not in known:
        where = "with --dtype float32" if config.model.dtype == "float32" else f"by --device {device}"
        raise ConfigError(f"--kv-cache-dtype {asked}: can't be kept {where}; known there: {', '.join(known)}")


def load_runner(
    config: Config,
    device: Device,
    checkpoint: Checkpoint,
    max_model_len: int,
    progress: Callable[[int, int], None],
) -> LoadedRunner:
    """Build and load the runner; `progress(done_bytes, total_bytes)` is called while weights load.

    Raises ConfigError for what the backend lacks.
    """
    if config.engine.engine == "mock":
        mock = MockRunner(
            checkpoint.config.vocab_size,
            max_rows=config.engine.max_num_seqs,
            step_ms=config.engine.mock_step_ms,
            prefill_tokens_per_s=config.engine.mock_prefill_tokens_per_s,
            banned_ids=checkpoint.eos_ids,
        )
        runner = ThreadedRunner(mock) if config.engine.mock_async else mock
        return LoadedRunner(runner=runner, default_kv_bytes=default_kv_memory_bytes(), available_kv_bytes=None)
    check_kv_cache_dtype(config, device)
    if device == "cuda":
        return load_cuda_runner(config, checkpoint, max_model_len, progress)
    tokring_kernels.set_num_threads(config.engine.cpu_threads or default_cpu_threads())
    cpu = CpuRunner(
        checkpoint,
        dtype=config.model.dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens(config, device),
        activation_bits=8 if config.engine.cpu_fast else 15,
        kv_cache_dtype="int8" if config.engine.kv_cache_dtype == "int8" else "auto",
        progress=progress,
    )
    return LoadedRunner(
        runner=cpu, default_kv_bytes=default_kv_memory_bytes(), available_kv_bytes=available_memory_bytes()
    )


def load_cuda_runner(
    config: Config, checkpoint: Checkpoint, max_model_len: int, progress: Callable[[int, int], None]
) -> LoadedRunner:
    """Import what only this backend needs, and build it."""
    from tokring.engine.cuda.open_device import open_device
    from tokring.engine.cuda.runner import CudaRunner

    speculation = config.engine.speculative_config
    kv_formats: dict[str, KvFormat] = {"int8": "int8", "fp8": "fp8"}
    runner = CudaRunner(
        checkpoint,
        open_device(hopper_attention=config.engine.hopper_attention),
        max_model_len=max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens(config, "cuda"),
        num_speculative_tokens=SpeculativeConfig.from_json(speculation).num_speculative_tokens if speculation else 0,
        kv_format=kv_formats.get(config.engine.kv_cache_dtype, "same"),
        progress=progress,
    )
    return LoadedRunner(
        runner=runner,
        default_kv_bytes=runner.kv_memory_bytes(config.engine.gpu_memory_utilization),
        available_kv_bytes=runner.kv_memory_bytes(1.0),
    )
