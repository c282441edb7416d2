"""EmulatedDevice: the CUDA backend without a GPU, for tests: kernels from their CUDA source, compiled for the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from tokring.engine.kv_memory import available_memory_bytes, default_kv_memory_bytes
from tokring_kernels.cuda.compiler import Compiler
from tokring_kernels.cuda.kernel import Arguments, Kernel, Size
from tokring_kernels.cuda.launcher import EmulatedLauncher, Launcher

Work = Callable[[], object]


class RecordedLaunches:
    """Launches with the arguments that they had when they were recorded."""

    def __init__(self, launches: list[Work]) -> None:
        self._launches = launches

    def replay(self) -> None:
        for launch in self._launches:
            launch()


class DoneEvent:
    """Nothing is asynchronous here."""

    def wait(self) -> None:
        """It is done."""


class RecordingLauncher:
    """Passes launches on, or keeps them for a graph."""

    def __init__(self, launcher: Launcher, run: Callable[[Work], None]) -> None:
        self._launcher = launcher
        self._run = run

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        self._launcher.prepare(kernels)

    def launch(self, kernel: Kernel, grid: Size, block: Size, shared_bytes: int, arguments: Arguments) -> None:
        self._run(lambda: self._launcher.launch(kernel, grid, block, shared_bytes, arguments))


class EmulatedDevice:
    """A Device on the CPU. As on a GPU, what is captured is not executed and sees only what it was recorded with."""

    def __init__(self, launcher: Launcher | None = None, *, has_warpgroups: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        torch.set_num_threads(
            1
        )  # of the process: products of tests are small, and threads that wait for each other cost
        self.has_warpgroups = has_warpgroups
        self.num_multiprocessors = 2  # so that attention is split at lengths that tests can afford
        self.launcher = RecordingLauncher(launcher or EmulatedLauncher(Compiler()), self.run)
        self._recording: list[Work] | None = None

    def run(self, work: Work) -> None:
        """Do it now, or as part of the graph that is being captured."""
        if self._recording is None:
            work()
        else:
            self._recording.append(work)

    def pinned(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._recording is not None:
            raise RuntimeError("a copy between host and device inside a graph")
        target.copy_(source)

    def product(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        def work() -> None:
            if out.dtype != x.dtype:
                torch.mm(x.to(out.dtype), weight.t().to(out.dtype), out=out)
            elif bias is None:
                torch.mm(x, weight.t(), out=out)
            else:
                torch.addmm(bias, x, weight.t(), out=out)

        self.run(work)

    def event(self) -> DoneEvent:
        return DoneEvent()

    def capture(self, work: Work) -> RecordedLaunches:
        launches: list[Work] = []
        self._recording = launches
        try:
            work()
        finally:
            self._recording = None
        return RecordedLaunches(launches)

    def free_bytes(self) -> int:
        return min(default_kv_memory_bytes(), self.total_bytes())

    def total_bytes(self) -> int:
        return available_memory_bytes()

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        yield
