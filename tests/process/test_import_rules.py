"""What each part loads: the front end, the supervisor and the engine's core come up without torch."""

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
heavy = {{"torch", "transformers"}} & set(sys.modules)
sys.exit(f"{{sorted(heavy)}} loaded" if heavy else 0)
"""


@pytest.mark.parametrize(
    ("package", "leave_out"),
    [
        ("tokring.cli", ()),
        ("tokring.launch", ()),
        ("tokring.offline", ()),
        ("tokring.server", ()),
        ("tokring.checkpoint", ()),
        ("tokring.engine", ()),
        ("tokring.models", ("torch_linear",)),
        ("tokring_ipc", ()),
        ("tokring_kernels", ()),
    ],
)
def test_every_module_loads_without_torch(package: str, leave_out: tuple[str, ...]) -> None:
    program = WALK.format(package=package, leave_out=leave_out)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
