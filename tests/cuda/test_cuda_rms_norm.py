"""residual_rms_norm equals the numpy reference."""

import numpy as np
import pytest

from tokring_kernels import reference
from tokring_kernels.cuda.kernel import Kernel
from tokring_kernels.cuda.launcher import EmulatedLauncher

RMS_NORM = Kernel("rms_norm.cu", "residual_rms_norm", "ppppif", (("ELEMENT", "Bf16"),))


@pytest.mark.parametrize("width", [8, 576, 4096])
def test_residual_rms_norm_equals_the_reference(launcher: EmulatedLauncher, width: int) -> None:
    rng = np.random.default_rng(width)
    residual, x = (reference.narrow(rng.normal(size=(3, width)).astype(np.float32)) for _ in range(2))
    weight = rng.normal(size=width).astype(np.float32)
    out = np.zeros_like(x)
    added = reference.narrow(reference.widen(residual) + reference.widen(x))
    expected = reference.rms_norm(added, weight, 1e-5)
    addresses = [array.ctypes.data for array in (out, residual, x, weight)]
    launcher.launch(RMS_NORM, (3,), (256,), 0, RMS_NORM.arguments(*addresses, width, 1e-5))
    np.testing.assert_array_equal(residual, added)
    np.testing.assert_allclose(reference.widen(out), expected, rtol=2**-8, atol=1e-6)
