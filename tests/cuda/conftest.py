"""CUDA kernels run in the emulation here, in each of three thread orders.

TOKRING_CUDA_LONG=1 (make check-cuda) adds every variant. TOKRING_EMULATION_OPTIONS: more options for g++, such as
-fsanitize=address; the process must then be started with the sanitizer's library loaded.
"""

import os
from pathlib import Path

import pytest

from tokring_kernels.cuda.compiler import Compiler
from tokring_kernels.cuda.launcher import EmulatedLauncher

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    options = tuple(os.environ.get("TOKRING_EMULATION_OPTIONS", "").split())
    return Compiler(ROOT / "build" / "emulation", options=options)


@pytest.fixture(params=[0, 1, 7], ids=["forward", "reverse", "random"])
def launcher(request: pytest.FixtureRequest, compiler: Compiler) -> EmulatedLauncher:
    return EmulatedLauncher(compiler, order=request.param)


@pytest.fixture
def forward(compiler: Compiler) -> EmulatedLauncher:
    """Threads in ascending order only; for what does not depend on it."""
    return EmulatedLauncher(compiler, workers=2)
