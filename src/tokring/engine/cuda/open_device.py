"""open_device: the GPU, or what stands for it in tests."""

from __future__ import annotations

from tokring.engine.cuda.backend import Device
from tokring.engine.cuda.device import is_emulated


def open_device() -> Device:
    """The device that find_cuda() has found. Raises DeviceFailure."""
    if is_emulated():
        from tokring.engine.cuda.emulated_device import EmulatedDevice

        return EmulatedDevice()
    from tokring.engine.cuda.torch_device import CudaDevice

    return CudaDevice()
