"""Launching kernels: on a GPU through CuPy's driver bindings, or on the CPU through the emulation; one interface."""

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from tokring_kernels.cuda.compiler import Compiler, cubin_architecture, import_nvrtc
from tokring_kernels.cuda.kernel import Arguments, Kernel, Size, three

# Above this a function must be told how much dynamic shared memory it may be launched with.
_UNANNOUNCED_SHARED_BYTES = 48 * 1024


class Launcher(Protocol):
    """Runs kernels; launches of one launcher are in order."""

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Compiles and loads what is missing, so that later launches don't (inside a graph capture they must not)."""
        ...

    def launch(self, kernel: Kernel, grid: Size, block: Size, shared_bytes: int, arguments: Arguments) -> None:
        """Starts grid x block threads with that much dynamic shared memory. A grid with a 0 in it does nothing."""
        ...


class DriverLauncher:
    """Launches on the device whose context is current, on the caller's stream of the moment.

    current_stream: called at every launch, returns the cudaStream_t as int, as in
    `lambda: torch.cuda.current_stream().cuda_stream`; never cached, for a capture changes it.
    capability: of the device, (9, 0) for Hopper.
    """

    def __init__(self, compiler: Compiler, capability: tuple[int, int], current_stream: Callable[[], int]) -> None:
        import_nvrtc()  # first, for it lets CuPy load
        from cupy_backends.cuda.api import driver

        self._driver = driver
        self._compiler = compiler
        self._architecture = cubin_architecture(capability)
        self._current_stream = current_stream
        self._modules: dict[tuple[Any, ...], int] = {}
        self._functions: dict[Kernel, int] = {}
        self._shared_limits: dict[Kernel, int] = {}

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        for kernel in kernels:
            self._function(kernel)

    def _function(self, kernel: Kernel) -> int:
        function = self._functions.get(kernel)
        if function is None:
            key = (kernel.source, kernel.defines)
            if key not in self._modules:
                cubin = self._compiler.cubin(kernel, kernel.only_for or self._architecture)
                self._modules[key] = self._driver.moduleLoadData(cubin)
            function = self._driver.moduleGetFunction(self._modules[key], kernel.function)
            self._functions[kernel] = function
        return function

    def launch(self, kernel: Kernel, grid: Size, block: Size, shared_bytes: int, arguments: Arguments) -> None:
        if 0 in grid:
            return
        function = self._function(kernel)
        if shared_bytes > self._shared_limits.get(kernel, _UNANNOUNCED_SHARED_BYTES):
            limit = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._driver.funcSetAttribute(function, limit, shared_bytes)
            self._shared_limits[kernel] = shared_bytes
        self._driver.launchKernel(
            function, *three(grid), *three(block), shared_bytes, self._current_stream(), arguments.address, 0
        )


class EmulationError(RuntimeError):
    """A kernel did what is undefined on a GPU; the message says what, and in which block and thread."""


class _Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]


class _Launch(ctypes.Structure):  # emulation.h: struct Launch
    _fields_ = [
        ("grid", _Dim3),
        ("block", _Dim3),
        ("shared_bytes", ctypes.c_uint64),
        ("order", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("error", ctypes.c_char_p),
    ]


class EmulatedLauncher:
    """Runs kernels on the CPU, each launch to its end; pointers are addresses of this process.

    order: 0 runs threads and blocks in ascending order, 1 in descending, a larger number is the seed of a random one.
    workers: OS threads. Raises EmulationError from launch.
    """

    def __init__(self, compiler: Compiler, *, order: int = 0, workers: int = 1) -> None:
        self.order = order
        self.workers = workers
        self._compiler = compiler
        self._libraries: dict[Path, ctypes.CDLL] = {}
        self._functions: dict[Kernel, Callable[..., int]] = {}

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        for kernel in kernels:
            self._function(kernel)

    def _function(self, kernel: Kernel) -> Callable[..., int]:
        function = self._functions.get(kernel)
        if function is None:
            path = self._compiler.emulation(kernel)
            library = self._libraries.setdefault(path, ctypes.CDLL(str(path)))
            function = library[f"emulated_{kernel.function}"]
            self._functions[kernel] = function
        return function

    def launch(self, kernel: Kernel, grid: Size, block: Size, shared_bytes: int, arguments: Arguments) -> None:
        if 0 in grid:
            return
        error = ctypes.create_string_buffer(256)
        launch = _Launch(
            _Dim3(*three(grid)),
            _Dim3(*three(block)),
            shared_bytes,
            self.order,
            self.workers,
            ctypes.cast(error, ctypes.c_char_p),
        )
        if self._function(kernel)(ctypes.byref(launch), ctypes.c_void_p(arguments.address)):
            raise EmulationError(f"{kernel.title}: {error.value.decode()}")
