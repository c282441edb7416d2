"""What each part loads: the front end, the supervisor and the engine's core come up without torch and CUDA."""

import subprocess
import sys

import pytest

WALK = """
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
names = [package.__name__]
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    if not module.name.endswith(("__main__", *{leave_out!r})):
        importlib.import_module(module.name)
heavy = {{"torch", "transformers", "cupy", "cupy_backends", "cuda"}} & set(sys.modules)
sys.exit(f"{{sorted(heavy)}} loaded" if heavy else 0)
"""


#: Loaded once a device was chosen; tokring.engine.cuda.device chooses it.
TORCH_MODULES_OF_CUDA = tuple(
    f"engine.cuda.{name}"
    for name in (
        "attention", "backend", "emulated_device", "lanes", "model", "open_device", "prefill_trial", "rules", "runner",
        "special_step", "step_buffer", "torch_device", "weights",
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("package", "leave_out"),
    [
        ("tokring.cli", ()),
        ("tokring.launch", ()),
        ("tokring.offline", ()),
        ("tokring.server", ()),
        ("tokring.checkpoint", ()),
        ("tokring.engine", TORCH_MODULES_OF_CUDA),
        ("tokring.models", ()),
        ("tokring_ipc", ()),
        ("tokring_kernels", ()),
    ],
)
def test_every_module_loads_without_torch_and_cuda(package: str, leave_out: tuple[str, ...]) -> None:
    program = WALK.format(package=package, leave_out=leave_out)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
