"""Compiles the native cores (nanobind, C++20) with setuptools alone; everything else is in pyproject.toml."""

import os
from pathlib import Path

import nanobind
from setuptools import Extension, setup

ROOT = Path(__file__).parent
ROBIN_MAP = Path(nanobind.__file__).parent / "ext" / "robin_map" / "include"
NANOBIND_INCLUDES = [nanobind.include_dir(), nanobind.source_dir(), str(ROBIN_MAP)]
# No -march: wheels must run on any x86-64; kernels pick instruction sets at run time by per-function targets.
# No contraction: a kernel says itself where it wants an FMA, so that its bits don't depend on the compiler's mood.
COMMON_FLAGS = [
    "-std=c++20",
    "-fvisibility=hidden",
    "-g0",
    "-fno-strict-aliasing",
    "-ffunction-sections",
    "-ffp-contract=off",
]
# A user's newer compiler may warn of more; in CI a warning is an error.
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if os.environ.get("CI") else [])]
# `make fuzz-http` builds with sanitizers, into a directory of its own.
SANITIZED = bool(os.environ.get("TOKRING_SANITIZE"))
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-O1", "-g1"]
COMPILE_ENDING = SANITIZE if SANITIZED else []
LINK_ENDING = SANITIZE[:1] if SANITIZED else ["-s"]
IPC_HEADERS = ["ipc/include/tokring/*.hpp"]


def relative(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def native(name: str, source_pattern: str, header_patterns: list[str], includes: list[str], optimize: str) -> Extension:
    """One nanobind extension: our sources plus nanobind's own runtime, compiled into the module."""
    return Extension(
        name,
        sources=relative(source_pattern),
        depends=[header for pattern in header_patterns for header in relative(pattern)],
        include_dirs=[*includes, *NANOBIND_INCLUDES],
        extra_compile_args=[*COMMON_FLAGS, *WARNINGS, optimize, "-DNDEBUG", *COMPILE_ENDING],
        extra_link_args=["-Wl,--gc-sections", "-pthread", *LINK_ENDING],
        language="c++",
    )


EXTENSIONS = [
    native("tokring_ipc._core", "ipc/src/*.cpp", [*IPC_HEADERS, "ipc/src/*.hpp"], ["ipc/include"], "-O2"),
    native(
        "tokring.server.token_path._native",
        "src/tokring/server/token_path/*.cpp",
        [*IPC_HEADERS, "src/tokring/server/token_path/*.hpp"],
        ["ipc/include"],
        "-O2",
    ),
    native(
        "tokring_kernels._cpu", "native_kernels/cpu/*.cpp", ["native_kernels/cpu/*.hpp"], ["native_kernels/cpu"], "-O3"
    ),
    native(
        "tokring.bench._native",
        "src/tokring/bench/*.cpp",
        [*IPC_HEADERS, "src/tokring/bench/*.hpp"],
        ["ipc/include"],
        "-O3",
    ),
]

# `make` compiles in place before it installs the checkout as editable: not a second time, into a folder thrown away.
setup(ext_modules=[] if os.environ.get("TOKRING_NATIVE_IN_PLACE") else EXTENSIONS)
