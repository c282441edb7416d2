"""The CUDA runner under the engine, its kernels emulated: every step checked against the CPU backend."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.models.paged_loop import PagedLoop
from tests.models.test_cuda_architectures import emulated_device
from tests.support.engine_harness import EngineHarness
from tests.support.fake_channel import Stream
from tests.support.shadowed_runner import ShadowedRunner
from tests.support.tiny_hf import write_tiny_hf
from tokring.checkpoint import Checkpoint, open_checkpoint
from tokring.engine.cpu_runner import CpuRunner
from tokring.engine.cuda.attention import PagedAttention
from tokring.engine.cuda.runner import GRAPH_RESERVE_BYTES, MAX_OTHER_LOGITS, CudaRunner, graph_sizes
from tokring.models.errors import ModelError
from tokring_ipc import FinishReason
from tokring_kernels.cuda.ops import CudaOps

pytestmark = pytest.mark.timeout(900)  # kernels are compiled at first use
MAX_MODEL_LEN = 96
SIZES: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 48, "num_blocks": 200
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(write_tiny_hf(tmp_path_factory.mktemp("tiny"), head_dim=64)))


def cpu_runner(checkpoint: Checkpoint) -> CpuRunner:
    return CpuRunner(checkpoint, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64)


def cuda_runner(checkpoint: Checkpoint, device: Any = None, **sizes: Any) -> CudaRunner:
    limits = {name: SIZES[name] for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
    return CudaRunner(checkpoint, device or emulated_device(), **(limits | sizes))


def submit_random(harness: EngineHarness, count: int, *, plain: bool) -> list[Stream]:
    random = np.random.default_rng(3)
    streams = []
    for i in range(count):
        shared = [5] * int(random.integers(0, 40))
        prompt = shared + random.integers(3, 60, random.integers(1, 30)).tolist()
        fields: dict[str, Any] = {"max_tokens": int(random.integers(1, 16)), "seed": i * 2**33 + i}
        if i % 2:
            fields |= {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
        if i % 3 == 0:
            fields["stop_ids"] = random.integers(3, 60, 4).tolist()
        if i % 4 == 0:
            fields["num_logprobs"] = i % 3
        if not plain and i % 5 == 3:
            fields |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2}
        if not plain and i % 7 == 2:
            fields["num_prompt_logprobs"] = 1
        streams.append(harness.channels[i % len(harness.channels)].submit(prompt, **fields))
    return streams


@pytest.mark.parametrize(
    ("plain", "config"),
    [
        (True, {}),
        (False, {"max_num_seqs": 5, "max_num_batched_tokens": 19, "num_channels": 3}),
    ],
    ids=["run ahead", "rules among them, small chunks, three front ends"],
)
def test_every_step_is_that_of_the_cpu_backend(checkpoint, plain, config):
    sizes = {name: config[name] for name in ("max_num_seqs", "max_num_batched_tokens") if name in config}
    runner = ShadowedRunner(cuda_runner(checkpoint, **sizes), cpu_runner(checkpoint))
    harness = EngineHarness(runner, **(SIZES | config))
    streams = submit_random(harness, 12, plain=plain)
    harness.run()
    harness.check_nothing_left()
    assert all(stream.reason in (FinishReason.LENGTH, FinishReason.STOP) for stream in streams)
    assert harness.core.scheduler.prefix_hits > 0 and runner.num_drawn > 0


@pytest.mark.parametrize(("kv_format", "max_error"), [("int8", 0.1), ("fp8", 0.5)])
def test_a_kv_cache_of_8_bits_holds_more_blocks_and_is_near_the_exact_one(checkpoint, kv_format, max_error):
    runner = ShadowedRunner(
        cuda_runner(checkpoint, kv_format=kv_format, max_num_seqs=2), cpu_runner(checkpoint), max_error
    )
    harness = EngineHarness(runner, **(SIZES | {"max_num_seqs": 2}))
    for prompt in (range(5, 40), range(5, 12), range(5, 38)):  # the last one finds two blocks of the first
        harness.submit(prompt, max_tokens=9)
    harness.run()
    assert harness.core.scheduler.prefix_hits > 0 and runner.num_drawn == 27
    config = checkpoint.config
    num_vectors = config.num_layers * 2 * config.num_kv_heads * 16
    assert runner.kv_bytes_per_block() == num_vectors * (config.head_dim + 4)
    caches = runner.runner._model.caches
    taken = sum(part.nbytes for cache in caches for part in cache if part is not None)
    assert taken == harness.config.num_blocks * runner.kv_bytes_per_block()


def test_preempted_requests_are_computed_again(checkpoint):
    runner = ShadowedRunner(cuda_runner(checkpoint), cpu_runner(checkpoint))
    harness = EngineHarness(runner, **(SIZES | {"num_blocks": 7}))
    streams = [harness.submit(range(5 + i, 19 + i), max_tokens=24) for i in range(4)]  # three blocks each in the end
    harness.run()
    assert [len(stream.token_ids) for stream in streams] == [24] * 4
    assert harness.core.scheduler.num_preemptions > 0


def test_greedy_tokens_are_those_of_the_cpu_backend(checkpoint):
    """Of prompts on whose way no second token is nearly as likely: elsewhere rounding decides, and may differ."""
    cpu = cpu_runner(checkpoint)
    prompts = prompts_without_near_ties(cpu, 4)
    harness = EngineHarness(cuda_runner(checkpoint), **SIZES)
    harness.runner.warm_up()
    streams = [harness.submit(prompt, max_tokens=NUM_GREEDY) for prompt, _ in prompts]
    harness.run()
    assert [stream.token_ids for stream in streams] == [tokens for _, tokens in prompts]


NUM_GREEDY = 8


def prompts_without_near_ties(runner: CpuRunner, num_prompts: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, its greedy tokens), each likelier than all others by a tenth of the logits' standard deviation."""
    found = []
    for seed in count():
        prompt = np.random.default_rng(seed).integers(3, 60, 5 + seed % 30).tolist()
        loop = PagedLoop(runner, num_sequences=1, max_length=MAX_MODEL_LEN)
        sequence, logits = loop.prefill(prompt)
        tokens, margin = [], np.inf
        for _ in range(NUM_GREEDY):
            second, first = np.sort(logits[-1])[-2:]
            margin = min(margin, (first - second) / logits[-1].std())
            tokens.append(int(logits[-1].argmax()))
            logits = loop.step({sequence: tokens[-1:]})[sequence]
        if margin > 0.1:
            found.append((prompt, tokens))
        if len(found) == num_prompts:
            return found
    raise AssertionError("unreachable")


def test_the_kv_cache_leaves_room_for_copies_of_all_logits(checkpoint):
    device = emulated_device()
    device.free_bytes, device.total_bytes = lambda: 3 << 30, lambda: 4 << 30
    runner = cuda_runner(checkpoint, device, num_speculative_tokens=3)
    logits_bytes = (SIZES["max_num_seqs"] * (1 + 3) + MAX_OTHER_LOGITS) * runner.vocab_size * 4
    most = (3 << 30) - GRAPH_RESERVE_BYTES - logits_bytes
    assert [runner.kv_memory_bytes(share) for share in (1.0, 0.75, 0.01)] == [most, most - (1 << 30), 0]


def test_no_step_looks_beyond_the_rope_tables(checkpoint, monkeypatch):
    """Those tried at the start have blocks of 16 tokens, --max-model-len may be 2."""
    highest = []
    write_kv = CudaOps.rope_and_write_kv

    def checked(self, query, qkv, keys, values, cosine, sine, positions, *rest, **options):
        highest.append(int(positions.max()))
        assert highest[-1] < len(cosine) == 2
        write_kv(self, query, qkv, keys, values, cosine, sine, positions, *rest, **options)

    monkeypatch.setattr(CudaOps, "rope_and_write_kv", checked)
    harness = EngineHarness(cuda_runner(checkpoint, max_model_len=2), **(SIZES | {"max_model_len": 2}))
    harness.runner.warm_up()
    streams = [harness.submit([5 + i], max_tokens=1) for i in range(3)]
    harness.run()
    assert [len(stream.token_ids) for stream in streams] == [1, 1, 1] and highest


def test_one_token_a_step_is_budget_enough(checkpoint):
    smallest = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
    runner = ShadowedRunner(cuda_runner(checkpoint, **smallest), cpu_runner(checkpoint))
    harness = EngineHarness(runner, **(SIZES | smallest))
    stream = harness.submit(range(5, 24), max_tokens=3)
    harness.run()
    assert len(stream.token_ids) == 3 and runner.num_steps == 19 + 2


def test_a_step_sends_only_what_changed(checkpoint):
    """Words to the device while four requests decode: none but a new block's each 16 tokens."""
    runner = cuda_runner(checkpoint)
    sent: list[list[int]] = []
    send = runner._buffer.send
    runner._buffer.send = lambda arrays: (sent.append([array.size for array in arrays]), send(arrays))[1]
    harness = EngineHarness(runner, **SIZES)
    runner.warm_up()
    for length in (3, 7, 10, 11):
        harness.submit(list(range(5, 5 + length)), max_tokens=20)
    for _ in range(3):  # prompts, tables, and from then on nothing
        harness.core.step()
    sent.clear()
    for _ in range(14):
        harness.core.step()
    # Positions 16 of the four sequences come in steps of their own; a pair and its count are three words.
    assert sent == [[3]] * 4


def test_decode_steps_are_replayed_graphs_of_the_next_size(checkpoint):
    assert (
        graph_sizes(256) == [1, 2, 4, 8, *range(16, 257, 8)]
        and graph_sizes(1) == [1]
        and graph_sizes(5) == [1, 2, 4, 5]
    )
    assert graph_sizes(512) == [1, 2, 4, 8, *range(16, 257, 8)]
    runner = cuda_runner(checkpoint)
    harness = EngineHarness(runner, **SIZES)
    runner.warm_up()
    for length in (3, 7, 10):
        harness.submit(list(range(5, 5 + length)), max_tokens=4)
    harness.run()
    assert runner.last_graph is runner._graphs[4]


def test_more_requests_than_the_largest_graph_holds_are_computed_without(checkpoint, monkeypatch):
    monkeypatch.setattr("tokring.engine.cuda.runner.LARGEST_GRAPH", 2)
    runner = ShadowedRunner(cuda_runner(checkpoint), cpu_runner(checkpoint))
    harness = EngineHarness(runner, **SIZES)
    streams = [harness.submit(range(5 + i, 12 + i), max_tokens=4 + i, seed=i, temperature=1.0) for i in range(4)]
    harness.run()
    assert [len(stream.token_ids) for stream in streams] == [4, 5, 6, 7]
    assert sorted(runner.runner._graphs) == [1, 2]


def test_more_requests_than_one_attention_launch_takes_are_refused_at_the_start():
    attention: Any = SimpleNamespace(head_dim=64, num_heads=64, num_kv_heads=64)
    PagedAttention(emulated_device(), attention, 1024)
    with pytest.raises(ModelError, match="1025 running requests: CUDA takes 1024 of this model; lower --max-num-seqs"):
        PagedAttention(emulated_device(), attention, 1025)
