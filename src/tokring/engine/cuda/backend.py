"""Device: where the CUDA backend's kernels, products, copies and graphs run: a GPU, or the emulation in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from tokring_kernels.cuda.launcher import Launcher


class Graph(Protocol):
    """A recorded sequence of launches with fixed arguments."""

    def replay(self) -> None: ...


class Event(Protocol):
    """A point in the order of the work."""

    def wait(self) -> None:
        """Block until all work before it is done."""
        ...


class Device(Protocol):
    """All work is done in the order of the calls, asynchronously where the device allows it."""

    torch_device: torch.device
    num_multiprocessors: int  # how many thread blocks it takes to be busy
    has_warpgroups: bool  # whether the kernels for Hopper run on it, and may

    @property
    def launcher(self) -> Launcher:
        """What runs kernels, in the order of all other work."""
        ...

    def pinned(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies to and from the device are asynchronous with."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between pinned host memory and the device, or on it."""
        ...

    def product(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """out[n, outputs] = x[n, inputs] weight[outputs, inputs]ᵀ + bias; out is of x's type or float32 (no bias)."""
        ...

    def event(self) -> Event:
        """The point reached by the calls so far."""
        ...

    def capture(self, work: Callable[[], object]) -> Graph:
        """Record what `work` launches, without executing it. Only kernels and product() may be in it."""
        ...

    def free_bytes(self) -> int:
        """Memory that is not in use."""
        ...

    def total_bytes(self) -> int:
        """All memory of the device."""
        ...

    def guard(self, what: str) -> Any:
        """A context in which errors of the device become DeviceFailure, whose message says what was being done."""
        ...
