"""Which device computes: --device auto|cpu|cuda, and in one line why CUDA can't be used."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
from dataclasses import dataclass

from tokring.checkpoint import ModelConfig
from tokring.config import Config, ConfigError, Device
from tokring_kernels.cuda.attention import HEAD_DIMS
from tokring_kernels.cuda.compiler import import_nvrtc
from tokring_kernels.cuda.ops import MAX_VOCAB, MAX_WIDTH

logger = logging.getLogger(__name__)

EMULATION_VARIABLE = "TOKRING_CUDA_EMULATION"  # a device for tests: the kernels' source compiled for the CPU
DRIVER_LIBRARY = "libcuda.so.1"
WIDTH_MULTIPLE = 8  # 16-byte loads of bfloat16
NEEDED_DRIVER = 13000  # CUDA 13.0: what the kernels' cubins are made by
NEEDED_CAPABILITY = (8, 0)  # bfloat16 mma and cp.async
EXTRA = "pip install 'tokring[cuda]'"
_MAJOR_ATTRIBUTE, _MINOR_ATTRIBUTE = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What the NVIDIA driver says about the first device that it shows this process."""

    version: int  # 1000 * major + 10 * minor of the CUDA version it supports
    device_name: str
    capability: tuple[int, int]


class NoCuda(Exception):
    """Why CUDA can't be used, in one line."""


class DeviceFailure(RuntimeError):
    """The device failed, or its memory is used up: this process can't go on. One line for the log."""


def choose_device(config: Config, model: ModelConfig, settled: Device | None = None) -> Device:
    """The device that --device names; with "auto" CUDA if it can be used. Raises ConfigError if "cuda" can't.

    settled: what this server's first engine has chosen. Later ones choose the same: another backend would have another
    token budget and KV cache. Raises DeviceFailure if CUDA can't be used any more.
    """
    asked = config.engine.device
    if "cpu" in (asked, settled) or config.engine.engine == "mock":
        return "cpu"
    try:
        description = find_cuda(config, model)
    except NoCuda as reason:
        if settled == "cuda":
            raise DeviceFailure(f"this server computes by CUDA, which can't be used any more: {reason}") from None
        if asked == "cuda":
            raise ConfigError(f"--device cuda: {reason}") from None
        logger.info("computing on the CPU; CUDA can't be used: %s", reason)
        return "cpu"
    logger.info("computing on %s", description)
    return "cuda"


def is_emulated() -> bool:
    """Whether the kernels run on the CPU, by the emulation: for tests of the CUDA backend, far too slow for use."""
    return os.environ.get(EMULATION_VARIABLE) == "1"


def find_cuda(config: Config, model: ModelConfig, library: str = DRIVER_LIBRARY) -> str:
    """What CUDA computes on, in words; raises NoCuda. The driver comes first: without one nothing else is loaded."""
    if is_emulated():
        check_model(config, model)
        return f"the emulation of CUDA ({EMULATION_VARIABLE}=1)"
    driver = read_driver(library)
    check_driver(driver)
    check_model(config, model)
    if importlib.util.find_spec("cupy") is None:
        raise NoCuda(f"the package CuPy is missing: {EXTRA}")
    check_torch_build()  # before CuPy, which is not loaded for nothing
    check_packages(driver)
    check_torch()
    return f"{driver.device_name} (compute capability {driver.capability[0]}.{driver.capability[1]})"


def read_driver(library: str) -> Driver:
    """Asks the driver, without any CUDA package. Raises NoCuda where there is no driver or no device."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        raise NoCuda(f"there is no NVIDIA driver ({error})") from None

    def call(name: str, *arguments: object) -> None:
        function = getattr(cuda, name, None)
        if function is None:
            raise NoCuda(f"{library} is not the NVIDIA driver's: it has no {name}")
        if code := function(*arguments):
            raise NoCuda(f"the NVIDIA driver finds no usable GPU: {name} says {error_name(cuda, code)}")

    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    major, minor, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(128)
    call("cuInit", 0)
    call("cuDriverGetVersion", ctypes.byref(version))
    call("cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise NoCuda("the NVIDIA driver shows no GPU: see CUDA_VISIBLE_DEVICES")
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDeviceGetName", name, len(name), device)
    call("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR_ATTRIBUTE, device)
    call("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR_ATTRIBUTE, device)
    return Driver(
        version=version.value, device_name=name.value.decode(errors="replace"), capability=(major.value, minor.value)
    )


def error_name(cuda: ctypes.CDLL, code: int) -> str:
    """CUDA_ERROR_NO_DEVICE (100), ..."""
    text = ctypes.c_char_p()
    if hasattr(cuda, "cuGetErrorName"):
        cuda.cuGetErrorName(code, ctypes.byref(text))
    return f"{text.value.decode()} ({code})" if text.value else f"error {code}"


def check_driver(driver: Driver) -> None:
    """Raises NoCuda for a driver or a device that is too old."""
    if driver.capability < NEEDED_CAPABILITY:
        raise NoCuda(
            f"{driver.device_name} has compute capability {dotted(driver.capability)}, "
            f"needed is {dotted(NEEDED_CAPABILITY)} (Ampere) or newer"
        )
    if driver.version < NEEDED_DRIVER:
        supported, needed = (
            dotted((version // 1000, version % 1000 // 10)) for version in (driver.version, NEEDED_DRIVER)
        )
        raise NoCuda(f"the NVIDIA driver supports CUDA {supported}, needed is {needed} or newer (driver 580)")


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def check_model(config: Config, model: ModelConfig) -> None:
    """Raises NoCuda for what the kernels don't cover."""
    if config.model.dtype == "float32":
        raise NoCuda("it computes in bfloat16, and --dtype is float32")
    if model.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise NoCuda(f"the model's heads have {model.head_dim} dimensions, there are kernels for {known}")
    for name in ("hidden_size", "intermediate_size"):
        if (value := getattr(model, name)) % WIDTH_MULTIPLE:
            raise NoCuda(f"the model's {name} is {value}, the kernels take multiples of {WIDTH_MULTIPLE}")
    for name, most in (("hidden_size", MAX_WIDTH), ("vocab_size", MAX_VOCAB)):
        if (value := getattr(model, name)) > most:
            raise NoCuda(f"the model's {name} is {value}, the kernels take at most {most}")


def check_packages(driver: Driver) -> None:
    """Raises NoCuda where CuPy, which is there, or NVRTC can't be loaded, or NVRTC is older than the device."""
    try:
        nvrtc = import_nvrtc()
    except Exception as error:  # CuPy raises what its libraries do
        raise NoCuda(f"CuPy can't be loaded: {one_line(error)}") from None
    try:
        version, architectures = nvrtc.getVersion(), nvrtc.getSupportedArchs()
    except Exception as error:
        raise NoCuda(f"NVRTC can't be loaded ({one_line(error)}): {EXTRA}") from None
    if 10 * driver.capability[0] + driver.capability[1] not in architectures:
        raise NoCuda(
            f"NVRTC {dotted(version)} can't compile for {driver.device_name} (compute capability "
            f"{dotted(driver.capability)}): pip install --upgrade nvidia-cuda-nvrtc"
        )


def check_torch_build() -> None:
    """Raises NoCuda where torch is missing or made for the CPU: of most such builds the version says so, unloaded."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise NoCuda("the package torch is missing: install a CUDA build of torch") from None
    if not version.endswith("+cpu"):
        import torch

        if torch.version.cuda is not None:
            return
    raise NoCuda(f"torch {version} is built without CUDA: install a CUDA build of torch")


def check_torch() -> None:
    """Raises NoCuda where torch can't use the device."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise NoCuda(f"torch {torch.__version__} can't use the GPU: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """What has caused it: CuPy frames that in a text of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines()
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)[:200]
