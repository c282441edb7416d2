"""CudaDevice: a GPU, by torch's stream, allocator and cuBLAS, and CuPy's driver bindings for our kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from tokring.engine.cuda.device import DeviceFailure
from tokring_kernels.cuda.compiler import CompileError, Compiler
from tokring_kernels.cuda.launcher import DriverLauncher


class CudaEvent:
    """A recorded torch.cuda.Event.

    Who waits for it sleeps: the next step runs meanwhile, so some 50 us more until a token is seen delay no step, while
    a thread that spins would take a core from the front ends all the time.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """One GPU. Everything runs on one stream of its own, which is torch's current one from then on."""

    def __init__(self, index: int = 0, *, hopper_attention: bool = True) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.num_multiprocessors = int(torch.cuda.get_device_properties(self.torch_device).multi_processor_count)
        capability = torch.cuda.get_device_capability(self.torch_device)
        self.has_warpgroups = hopper_attention and capability == (9, 0)
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # the default stream can't be captured
        torch.cuda.set_stream(self._stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._can_widen = _can_widen(self.torch_device)
        self.launcher = DriverLauncher(
            Compiler(),
            capability,
            lambda: int(torch.cuda.current_stream().cuda_stream),  # asked at each launch: a capture changes it
        )

    def pinned(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def product(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if out.dtype != x.dtype:
            if self._can_widen:
                torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
            else:  # the sums are rounded to x's type
                out.copy_(torch.mm(x, weight.t()))
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    def event(self) -> CudaEvent:
        return CudaEvent()

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph

    def free_bytes(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what torch keeps for later counts as free
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        try:
            yield
        except CompileError as error:
            raise DeviceFailure(f"kernels can't be compiled {what}: {error}") from error
        except torch.OutOfMemoryError as error:
            raise DeviceFailure(
                f"out of GPU memory {what}: lower --gpu-memory-utilization, --max-num-batched-tokens or "
                f"--kv-cache-memory-bytes ({_first_line(error)})"
            ) from error
        except RuntimeError as error:  # torch's and CuPy's errors of the driver
            raise DeviceFailure(f"the GPU failed {what}: {_first_line(error)}") from error


def _can_widen(device: torch.device) -> bool:
    """Whether this torch multiplies bfloat16 into float32."""
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(x, x, out_dtype=torch.float32, out=torch.empty(16, 16, device=device))
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
