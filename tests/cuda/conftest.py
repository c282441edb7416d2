"""CUDA kernels run in the emulation here, in each of three thread orders."""

from pathlib import Path

import pytest

from tokring_kernels.cuda.compiler import Compiler
from tokring_kernels.cuda.launcher import EmulatedLauncher

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    return Compiler(ROOT / "build" / "emulation")


@pytest.fixture(params=[0, 1, 7], ids=["forward", "reverse", "random"])
def launcher(request: pytest.FixtureRequest, compiler: Compiler) -> EmulatedLauncher:
    return EmulatedLauncher(compiler, order=request.param)
