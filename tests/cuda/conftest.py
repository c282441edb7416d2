"""CUDA kernels run in the emulation here: attention in each of three thread orders, the ops in a random one.

TOKRING_CUDA_LONG=1 (make check-cuda) adds every variant, and all orders for all. TOKRING_EMULATION_OPTIONS: more
options for g++, such as -fsanitize=address; the process must then be started with the sanitizer's library loaded.
TOKRING_CUDA_GPU=1 (make test-gpu): the kernels run on the GPU instead, once, for its thread order is its own.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cuda.mirror import MirroringLauncher, TorchMemory
from tests.cuda.variants import LONG
from tests.gpu.conftest import why_no_gpu

from tokring_kernels.cuda import check, inventory
from tokring_kernels.cuda.compiler import Compiler
from tokring_kernels.cuda.launcher import EmulatedLauncher, Launcher

ON_GPU = bool(os.environ.get("TOKRING_CUDA_GPU"))
ROOT = Path(__file__).parents[2]
ORDERS = {"forward": 0, "reverse": 1, "random": 7}


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    options = tuple(os.environ.get("TOKRING_EMULATION_OPTIONS", "").split())
    compiler = Compiler(ROOT / "build" / "emulation", options=options)
    if LONG and not ON_GPU:  # all there are will be needed: on all cores
        modules = check.modules_of(inventory.all_kernels())
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compiler.emulation, [module[0] for module in modules]))
    return compiler


@pytest.fixture(params=["gpu"] if ON_GPU else list(ORDERS) if LONG else ["random"])
def launcher(request: pytest.FixtureRequest, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    return gpu_launcher(monkeypatch) if ON_GPU else EmulatedLauncher(compiler, order=ORDERS[request.param])


@pytest.fixture(params=["gpu"] if ON_GPU else list(ORDERS))
def each_order(request: pytest.FixtureRequest, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """In the short form, too."""
    return gpu_launcher(monkeypatch) if ON_GPU else EmulatedLauncher(compiler, order=ORDERS[request.param])


@pytest.fixture
def forward(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Threads in ascending order only; for what does not depend on it."""
    return gpu_launcher(monkeypatch) if ON_GPU else EmulatedLauncher(compiler, workers=2)


@pytest.fixture
def hopper() -> None:
    """Skips tests of kernels for sm_90a on another GPU; the emulation runs them."""
    if ON_GPU and not why_no_gpu():
        import torch

        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("not run: not a Hopper GPU")


def gpu_launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Of the current GPU; skips the test, saying why, where there is none."""
    if reason := why_no_gpu():
        pytest.skip(f"not run: no GPU: {reason}")
    from tokring.engine.cuda.torch_device import CudaDevice

    return MirroringLauncher(CudaDevice().launcher, TorchMemory(), monkeypatch)
