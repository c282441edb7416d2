"""Compiles kernel sources: to cubins by NVRTC, to shared libraries by g++; both kept on disk under what went into them.

NVRTC compiles without a GPU or driver and runs ptxas. It is not nvcc: what ships is checked with NVRTC.
"""

import contextlib
import hashlib
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tokring_kernels.cuda.kernel import Kernel

SOURCES = Path(__file__).parent / "sources"
HEADERS = tuple(sorted(path.name for path in SOURCES.glob("*.cuh")))
NVRTC_OPTIONS = ("-std=c++17", "--ptxas-options=-v")
EMULATION_OPTIONS = (
    "-std=c++20",
    "-O2",
    "-g1",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-DTOKRING_EMULATION",
)


class CompileError(RuntimeError):
    """A source does not compile, then the message is the compiler's log; or the result can't be kept."""


def default_directory() -> Path:
    """$XDG_CACHE_HOME/tokring/kernels, in ~/.cache without that. Raises CompileError where there is no home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache") / "tokring" / "kernels"
    except RuntimeError:  # no HOME, and the user has no entry in the password database: in containers
        raise CompileError(
            "there is no home directory for compiled kernels: set XDG_CACHE_HOME to a directory that can be written"
        ) from None


def cubin_architecture(capability: tuple[int, int]) -> str:
    """sm_90 for (9, 0)."""
    return f"sm_{capability[0]}{capability[1]}"


class Compiler:
    """Compiled kernels on disk, found again by a hash of source, headers, options and compiler version.

    directory: made when needed; may be shared by processes. options: more options for g++ (sanitizers).
    """

    def __init__(self, directory: Path | None = None, sources: Path = SOURCES, options: tuple[str, ...] = ()) -> None:
        self._directory = directory or default_directory()
        self._sources = sources
        self._emulation_options = (*EMULATION_OPTIONS, *options)

    def cubin(self, kernel: Kernel, architecture: str) -> bytes:
        """The image that holds all kernels of this source with these defines. Raises CompileError."""
        return self.cubin_and_log(kernel, architecture)[0]

    def cubin_and_log(self, kernel: Kernel, architecture: str) -> tuple[bytes, str]:
        """The image and ptxas' report (registers, spills) on each of its kernels."""
        nvrtc = import_nvrtc()
        options = (f"-arch={architecture}", *NVRTC_OPTIONS, *_defines(kernel))
        version = ".".join(map(str, nvrtc.getVersion()))
        path = self._path(kernel, HEADERS, ("nvrtc", version, *options), ".cubin")

        def build() -> bytes:
            image, log = _nvrtc(kernel.source, self._text(kernel.source), self._headers(), options)
            return b"".join((struct.pack("<Q", len(image)), image, log.encode()))

        content = self._kept(path, build)
        end = 8 + struct.unpack_from("<Q", content)[0]
        return content[8:end], content[end:].decode()

    def emulation(self, kernel: Kernel) -> Path:
        """A shared library with an `emulated_<function>` for each kernel of the source. Raises CompileError."""
        options = (*self._emulation_options, *_defines(kernel))
        path = self._path(kernel, (*HEADERS, "emulation.h"), ("g++", _gxx_version(), *options), ".so")
        if not path.exists():
            with _new_file(path) as target:
                command = ["g++", *options, "-x", "c++", str(self._sources / kernel.source), "-o", str(target)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise CompileError(f"g++ cannot compile {kernel.source}:\n{done.stderr}")
        return path

    def _text(self, name: str) -> str:
        return (self._sources / name).read_text()

    def _headers(self) -> dict[str, str]:
        return {name: self._text(name) for name in HEADERS}

    def _path(self, kernel: Kernel, headers: tuple[str, ...], options: tuple[str, ...], suffix: str) -> Path:
        parts = (kernel.source, self._text(kernel.source), *(self._text(name) for name in headers), *options)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return self._directory / f"{Path(kernel.source).stem}-{digest[:32]}{suffix}"

    def _kept(self, path: Path, build: Callable[[], bytes]) -> bytes:
        """What `build` returns, from the file if an earlier call has left it there whole: its hash comes first."""
        content = None
        with _explained(path), contextlib.suppress(FileNotFoundError):
            content = _whole(path.read_bytes())
        if content is None:
            content = build()
            with _new_file(path) as target:
                target.write_bytes(hashlib.sha256(content).digest() + content)
        return content


def _whole(file: bytes) -> bytes | None:
    """What is behind the hash; None if it is not what was hashed."""
    size = hashlib.sha256().digest_size
    return file[size:] if hashlib.sha256(file[size:]).digest() == file[:size] else None


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A file to be written, which gets its name at the end: other processes see all of it or nothing."""
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            target = Path(directory) / path.name
            yield target
            _flush(target)
            target.replace(path)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the file become CompileError with the remedy."""
    try:
        yield
    except OSError as error:
        raise CompileError(
            f"compiled kernels can't be kept in {path.parent} ({error.strerror}): "
            "set XDG_CACHE_HOME to a directory that can be written"
        ) from None


def _defines(kernel: Kernel) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in kernel.defines)


def _flush(path: Path) -> None:
    """To the disk, before the file gets its final name: after a power cut there must not be an empty one under it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def import_nvrtc() -> Any:
    """CuPy's binding of NVRTC. Raises what CuPy does where something is missing, CompileError without a home.

    CuPy makes a directory for kernels of its own when it is imported, in a home that may be read-only: it gets ours.
    """
    os.environ.setdefault("CUPY_CACHE_DIR", str(default_directory()))
    from cupy.cuda import nvrtc

    return nvrtc


def _nvrtc(name: str, source: str, headers: dict[str, str], options: tuple[str, ...]) -> tuple[bytes, str]:
    """The cubin and the compiler's log. Raises CompileError."""
    nvrtc = import_nvrtc()
    contents = tuple(text.encode() for text in headers.values())
    program = nvrtc.createProgram(source, name, contents, tuple(header.encode() for header in headers))
    try:
        nvrtc.compileProgram(program, options)
        # CuPy 14.2 leaves out the image's last byte, a zero; without it tools cannot read the file.
        image = nvrtc.getCUBIN(program) + b"\0"
        return image, nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"NVRTC cannot compile {name}: {error}\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)


@cache
def _gxx_version() -> str:
    try:
        done = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"the emulation needs g++: {error}") from None
    return done.stdout.strip()
