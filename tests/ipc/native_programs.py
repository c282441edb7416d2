"""Builds the C++ test programs of tests/ipc/native against the headers of ipc/include."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "native"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-Wno-sign-conversion")


def build(program: Path, source: str, *flags: str) -> Path:
    """Compiles one program with every warning an error; returns its path."""
    subprocess.run(
        ["g++", "-std=c++20", "-g", *WARNINGS, "-I", str(ROOT / "ipc" / "include"), *flags]
        + [str(SOURCES / source), "-o", str(program), "-pthread"],
        check=True,
    )
    return program


def build_sanitized(program: Path, source: str, sanitizers: str, *flags: str) -> Path:
    return build(program, source, "-O1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", *flags)
