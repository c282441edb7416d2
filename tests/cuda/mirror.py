"""Runs tests that pass numpy arrays on a device with its own memory: they are copied there and back at each launch."""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from tokring_kernels.cuda import arrays
from tokring_kernels.cuda.kernel import Arguments, Kernel, Size
from tokring_kernels.cuda.launcher import Launcher

Bytes = NDArray[np.uint8]


class DeviceMemory(Protocol):
    def put(self, host: Bytes) -> Any: ...

    def address(self, copy: Any) -> int: ...

    def get(self, copy: Any) -> Bytes:
        """Waits for what was launched."""
        ...


class TorchMemory:
    """Of the current GPU."""

    def put(self, host: Bytes) -> Any:
        import torch

        return torch.from_numpy(host).cuda()

    def address(self, copy: Any) -> int:
        return int(copy.data_ptr())

    def get(self, copy: Any) -> Bytes:
        found: Bytes = copy.cpu().numpy()
        return found


class MirroringLauncher:
    """Knows every numpy array whose address was asked for, and keeps it; a pointer may lead anywhere inside of one."""

    def __init__(self, launcher: Launcher, memory: DeviceMemory, monkeypatch: pytest.MonkeyPatch) -> None:
        self._launcher = launcher
        self._memory = memory
        self._known: dict[int, NDArray[Any]] = {}
        self._plain_address = arrays.address
        for module in ("arrays", "ops"):
            monkeypatch.setattr(f"tokring_kernels.cuda.{module}.address", self._address)

    def _address(self, array: Any) -> int:
        if isinstance(array, np.ndarray) and array.nbytes:
            root = array
            while isinstance(root.base, np.ndarray):
                root = root.base
            self._known[root.__array_interface__["data"][0]] = root
        return self._plain_address(array)

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        self._launcher.prepare(kernels)

    def launch(self, kernel: Kernel, grid: Size, block: Size, shared_bytes: int, arguments: Arguments) -> None:
        copies: dict[int, Any] = {}
        values = [
            self._moved(value, copies) if letter == "p" and value else value
            for letter, value in zip(kernel.parameters, arguments.values(kernel), strict=True)
        ]
        self._launcher.launch(kernel, grid, block, shared_bytes, kernel.arguments(*values))
        for start, copy in copies.items():
            host = self._known[start].reshape(-1).view(np.uint8)
            found = self._memory.get(copy)
            if host.flags.writeable:
                host[:] = found

    def _moved(self, address: int, copies: dict[int, Any]) -> int:
        for start, array in self._known.items():
            if start <= address < start + array.nbytes:
                if start not in copies:
                    copies[start] = self._memory.put(array.reshape(-1).view(np.uint8))
                return self._memory.address(copies[start]) + address - start
        return address  # of an empty array: nobody reads it
