"""Architectures on the CUDA runner, its kernels emulated, against transformers. `make test-gpu` has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cuda_models import check_architecture
from tokring.engine.cuda.emulated_device import EmulatedDevice
from tokring_kernels.cuda.compiler import Compiler
from tokring_kernels.cuda.launcher import EmulatedLauncher

pytestmark = pytest.mark.timeout(900)  # kernels are compiled at first use
ROOT = Path(__file__).parents[2]


def emulated_device(*, has_warpgroups: bool = False) -> EmulatedDevice:
    """With the compiled kernels of the kernels' own tests."""
    launcher = EmulatedLauncher(Compiler(ROOT / "build" / "emulation"))
    return EmulatedDevice(launcher, has_warpgroups=has_warpgroups)


@pytest.mark.parametrize("name", ["qwen2-window", "gemma2", "gemma3", "phi3-partial-longrope"])
def test_logits_are_near_those_of_transformers(name: str, tmp_path: Path) -> None:
    check_architecture(name, tmp_path, emulated_device())
