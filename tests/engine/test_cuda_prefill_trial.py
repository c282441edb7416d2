"""The prefill kernel for Hopper is tried beside its twin, and used only if it agrees; here both are emulated."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

import pytest

from tests.engine.test_cuda_runner import SIZES, cpu_runner, cuda_runner
from tests.models.test_cuda_architectures import ROOT, emulated_device
from tests.support.engine_harness import EngineHarness
from tests.support.shadowed_runner import ShadowedRunner
from tests.support.tiny_hf import write_tiny_hf
from tokring.checkpoint import Checkpoint, open_checkpoint
from tokring.engine.cuda import prefill_trial
from tokring.engine.cuda.emulated_device import EmulatedDevice
from tokring.engine.cuda.prefill_trial import PrefillTrial, TrialApart, fault_of
from tokring.engine.cuda.runner import CudaRunner
from tokring_kernels.cuda.attention import AttentionShape
from tokring_kernels.cuda.kernel import Arguments, Kernel, Size
from tokring_kernels.cuda.launcher import EmulationError, Launcher

pytestmark = pytest.mark.timeout(900)  # kernels are compiled at first use

HOPPER, TWIN = "paged_prefill_wgmma", "paged_prefill"
SHAPE = AttentionShape(element="Bf16", head_dim=64, num_heads=2, num_kv_heads=1)


class WatchedLauncher:
    """Notes what is launched. fault: what becomes of the kernel for Hopper instead of its launch."""

    def __init__(self, launcher: Launcher, fault: str = "") -> None:
        self.launched: list[str] = []
        self._launcher = launcher
        self._fault = fault

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        self._launcher.prepare(kernels)

    def launch(self, kernel: Kernel, grid: Size, block: Size, shared_bytes: int, arguments: Arguments) -> None:
        self.launched.append(kernel.function)
        if kernel.function == HOPPER and self._fault == "fails":
            raise EmulationError("a matrix starts inside of its swizzle pattern\nand more")
        if kernel.function == HOPPER and self._fault == "does nothing":
            return
        if kernel.function == HOPPER and self._fault == "forgets the last sequence":
            grid = (grid[0], grid[1], grid[2] - 1)
        self._launcher.launch(kernel, grid, block, shared_bytes, arguments)


def watched_device(fault: str = "") -> tuple[EmulatedDevice, WatchedLauncher]:
    device = emulated_device(has_warpgroups=True)
    launcher = WatchedLauncher(device.launcher, fault)
    device.launcher = launcher  # type: ignore[assignment]
    return device, launcher


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(write_tiny_hf(tmp_path_factory.mktemp("tiny"), head_dim=64)))


def run_engine(checkpoint: Checkpoint, runner: CudaRunner, launcher: WatchedLauncher) -> set[str]:
    """Every step is checked against the CPU backend; the prefill kernels that were launched."""
    launcher.launched.clear()
    harness = EngineHarness(ShadowedRunner(runner, cpu_runner(checkpoint)), **SIZES)
    streams = [harness.submit(range(5, 5 + length), max_tokens=3) for length in (40, 3, 55)]
    harness.run()
    assert [len(stream.token_ids) for stream in streams] == [3] * 3
    return {HOPPER, TWIN} & set(launcher.launched)


def test_an_engine_computes_prompts_by_the_kernel_that_agrees(checkpoint, caplog):
    caplog.set_level(logging.INFO)
    device, launcher = watched_device()
    runner = cuda_runner(checkpoint, device)
    assert caplog.messages == ["prompts are computed by the kernel for Hopper; it agrees with its twin on this device"]
    assert run_engine(checkpoint, runner, launcher) == {HOPPER}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("fails", "it fails: a matrix starts inside of its swizzle pattern"),
        ("does nothing", "its results differ by inf of a head's output (window 0, soft cap 0)"),
        ("forgets the last sequence", "its results differ by inf of a head's output (window 0, soft cap 0)"),
    ],
)
def test_an_engine_whose_kernel_is_wrong_says_so_and_computes_prompts_by_the_twin(checkpoint, caplog, fault, says):
    device, launcher = watched_device(fault)
    runner = cuda_runner(checkpoint, device)
    assert caplog.messages == [f"the prefill kernel for Hopper is not used, its twin for all GPUs is: {says}"]
    assert run_engine(checkpoint, runner, launcher) == {TWIN}


@pytest.mark.parametrize("option", ["head_dim", "kv_format", "has_warpgroups"])
def test_what_the_kernel_is_not_for_is_not_tried(option):
    device, launcher = watched_device()
    device.has_warpgroups = option != "has_warpgroups"
    sizes = {"head_dim": 80 if option == "head_dim" else 64, "kv_format": "int8" if option == "kv_format" else "same"}
    shape = AttentionShape(element="Bf16", num_heads=2, num_kv_heads=1, **sizes)  # type: ignore[arg-type]
    assert not PrefillTrial(device, shape).passed()
    assert launcher.launched == []


def test_results_that_differ_are_told_in_numbers(monkeypatch):
    """Of a window that the kernel does not get."""
    device, _ = watched_device()
    plain = prefill_trial.paged_prefill

    def without_window(*arguments, **options):
        plain(*arguments, **options | ({"window": 0} if options["warpgroups"] else {}))

    monkeypatch.setattr(prefill_trial, "paged_prefill", without_window)
    assert "of a head's output (window 200, soft cap 0)" in fault_of(device, SHAPE)


def test_the_trial_in_a_process_of_its_own(monkeypatch, tmp_path):
    """As on a GPU, where a kernel may take the CUDA context with it."""
    monkeypatch.setenv("TOKRING_CUDA_EMULATION", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(ROOT / "build"))
    assert TrialApart(SHAPE).fault() == ""
    assert TrialApart(SHAPE).fault(timeout_s=0.001) == "its trial took more than 0.001 s"
    script = tmp_path / "crash"
    script.write_text("#!/bin/sh\necho first >&2\necho illegal instruction >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert TrialApart(SHAPE).fault() == "its trial ended with code 3: illegal instruction"


def test_a_trial_that_cannot_be_started_is_a_fault_like_another(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "No such file" in TrialApart(SHAPE).fault()
