"""The CUDA runner on a GPU: against transformers and the CPU backend, graphs against eager steps, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_cuda_runner import SIZES, submit_random
from tests.models.tiny_checkpoints import MODELS
from tests.support.engine_harness import EngineHarness
from tests.support.shadowed_runner import ShadowedRunner
from tests.support.tiny_hf import write_tiny_hf
from tokring.checkpoint import Checkpoint, open_checkpoint
from tokring.checkpoint.export import export
from tokring.engine.cpu_runner import CpuRunner


@pytest.fixture(scope="module")
def device(gpu: None) -> Any:
    from tokring.engine.cuda.torch_device import CudaDevice

    return CudaDevice()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(write_tiny_hf(tmp_path_factory.mktemp("tiny"), head_dim=64)))


def build(checkpoint: Checkpoint, device: Any, **options: Any) -> Any:
    from tokring.engine.cuda.runner import CudaRunner

    limits = {name: SIZES[name] for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
    return CudaRunner(checkpoint, device, **(limits | options))


def shadow_of(checkpoint: Checkpoint) -> CpuRunner:
    return CpuRunner(checkpoint, dtype="bfloat16", max_model_len=SIZES["max_model_len"], max_num_batched_tokens=64)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama-odd-sizes"])
def test_every_architecture_is_near_transformers(name, tmp_path, device):
    from tests.support.cuda_models import check_architecture

    check_architecture(name, tmp_path, device)


@pytest.mark.parametrize("plain", [True, False], ids=["plain requests", "rules among them"])
@pytest.mark.parametrize("config", [{}, {"num_blocks": 12}, {"async_scheduling": False}])
def test_every_step_is_that_of_the_cpu_backend(checkpoint, device, config, plain):
    harness = EngineHarness(ShadowedRunner(build(checkpoint, device), shadow_of(checkpoint)), **(SIZES | config))
    submit_random(harness, 24, plain=plain)
    harness.run()
    harness.check_nothing_left()


@pytest.mark.parametrize("config", [{}, {"num_blocks": 6}], ids=["", "preempted"])
def test_rules_grammars_and_logprobs_are_those_of_the_host(checkpoint, device, config):
    from tests.engine.test_cuda_rules import FEW, NEEDING_TOKENS, RULES, grammar_compiler, run

    runner = ShadowedRunner(build(checkpoint, device, **FEW), shadow_of(checkpoint), max_error=0.1)
    with grammar_compiler() as compiler:
        run(runner, compiler, RULES + NEEDING_TOKENS, **config)
    assert runner.num_masked > 0 and runner.num_logprobs > 40


@pytest.mark.parametrize(("kv_format", "max_error"), [("int8", 0.1), ("fp8", 0.5)])
def test_a_kv_cache_of_8_bits_is_near_the_exact_one(checkpoint, device, kv_format, max_error):
    runner = ShadowedRunner(build(checkpoint, device, kv_format=kv_format), shadow_of(checkpoint), max_error)
    harness = EngineHarness(runner, **SIZES)
    submit_random(harness, 12, plain=True)
    harness.run()
    harness.check_nothing_left()


class Eager:
    """In a graph's place: the work itself."""

    def __init__(self, runner: Any, size: int) -> None:
        self._runner, self._size = runner, size

    def replay(self) -> None:
        self._runner._decode(self._size)


def test_graphs_give_the_tokens_of_eager_steps(checkpoint, device):
    tokens = []
    for eager in (False, True):
        runner = build(checkpoint, device)
        harness = EngineHarness(runner, **SIZES)
        runner.warm_up()
        if eager:
            runner._graphs = {size: Eager(runner, size) for size in runner._graphs}
        streams = submit_random(harness, 24, plain=True)
        harness.run()
        tokens.append([stream.token_ids for stream in streams])
    assert tokens[0] == tokens[1]


def test_the_small_model_that_comes_along_is_near_transformers(tmp_path: Path, device):
    import torch
    import transformers

    from tests.models.paged_loop import PagedLoop
    from tests.support.cuda_models import EveryStepCollected, relative_error
    from tokring.engine.cuda.runner import CudaRunner

    checkpoint = open_checkpoint(None)
    export(checkpoint, tmp_path, dtype="bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, 300).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0].numpy()
    runner = CudaRunner(checkpoint, device, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=128)
    loop = PagedLoop(EveryStepCollected(runner), num_sequences=1, max_length=512)
    assert relative_error(loop.prefill(prompt, chunk=100)[1], expected) < 0.05


def test_memory_that_is_not_there_is_refused_in_one_line(checkpoint, device):
    from tokring.engine.cuda.device import DeviceFailure

    runner = build(checkpoint, device)
    with pytest.raises(DeviceFailure, match="out of GPU memory while the KV cache was allocated: lower"):
        runner.allocate_kv_cache(1 << 30)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4])
def test_the_prefill_kernel_for_hopper_agrees_with_its_twin(device, head_dim, group):
    from tokring.engine.cuda.prefill_trial import TrialApart
    from tokring_kernels.cuda.attention import AttentionShape

    if not device.has_warpgroups:
        pytest.skip("not run: not a Hopper GPU")
    assert (
        TrialApart(AttentionShape(element="Bf16", head_dim=head_dim, num_heads=4 * group, num_kv_heads=4)).fault() == ""
    )
