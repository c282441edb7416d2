"""open_device: the GPU, or what stands for it in tests."""

from __future__ import annotations

from tokring.engine.cuda.backend import Device
from tokring.engine.cuda.device import DeviceFailure, is_emulated
from tokring_kernels.cuda.compiler import CompileError


def open_device(*, hopper_attention: bool = True) -> Device:
    """The device that find_cuda() has found. Raises DeviceFailure."""
    try:
        if is_emulated():
            from tokring.engine.cuda.emulated_device import EmulatedDevice

            return EmulatedDevice()
        from tokring.engine.cuda.torch_device import CudaDevice

        return CudaDevice(hopper_attention=hopper_attention)
    except CompileError as error:
        raise DeviceFailure(str(error)) from error
