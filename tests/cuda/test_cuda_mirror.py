"""The launcher that takes these tests to a GPU, with other host memory in the GPU's place."""

from typing import Any

import numpy as np
import pytest
from tests.cuda.attention_case import Case
from tests.cuda.mirror import Bytes, MirroringLauncher

from tokring_kernels.cuda.launcher import EmulatedLauncher


class OtherMemory:
    def put(self, host: Bytes) -> Any:
        return host.copy()

    def address(self, copy: Any) -> int:
        return int(copy.ctypes.data)

    def get(self, copy: Any) -> Bytes:
        found: Bytes = copy
        return found


def test_arrays_travel_to_the_device_and_back(forward: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher: Any = MirroringLauncher(forward, OtherMemory(), monkeypatch)
    case = Case(lengths=[5, 200], num_queries=[1, 1])
    case.check(case.decode(launcher, 4))
    assert np.isfinite(case.expected()).all()
