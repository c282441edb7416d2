"""Packages hold the kernels' sources, as files."""

import subprocess
import sys
from pathlib import Path

from tokring_kernels.cuda.compiler import SOURCES

ROOT = Path(__file__).parents[2]


def test_a_built_package_holds_every_source(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    built = tmp_path / "tokring_kernels" / "cuda" / "sources"
    assert not built.is_symlink()
    assert {path.name: path.read_text() for path in built.iterdir()} == {
        path.name: path.read_text() for path in SOURCES.iterdir()
    }
