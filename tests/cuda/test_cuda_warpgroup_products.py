"""Descriptors mean what the PTX ISA's canonical layouts say: to the emulation, and to a GPU where there is one."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cuda.arrays import narrowed, widened
from tests.cuda.conftest import ON_GPU, gpu_launcher
from tests.cuda.mirror import MirroringLauncher, TorchMemory

from tokring_kernels.cuda import arrays
from tokring_kernels.cuda.compiler import SOURCES, Compiler
from tokring_kernels.cuda.kernel import Kernel
from tokring_kernels.cuda.launcher import DriverLauncher, EmulatedLauncher, EmulationError, Launcher

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("hopper")]  # compilers on a busy machine

# One product of matrices that lie anywhere in `image`, by descriptors whose addresses count from its beginning.
SOURCE = """
#include "device.cuh"
struct Memory {
  char* base;
  uint64_t start;
};
DEVICE Memory bring(void* memory, const char* image, int bytes) {
  char* const base = static_cast<char*>(align_shared<1024>(memory));
  for (int i = int(threadIdx.x) * 16; i < bytes; i += 128 * 16) copy_async(base + i, image + i, true);
  close_copy_group();
  wait_copies<0>();
  fence_async_proxy();
  block_barrier();
  return {base, shared_address(base) >> 4};
}
DEVICE void store(float* out, const float (&d)[32]) {
  const int row = int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4, column = int(threadIdx.x) % 4 * 2;
  for (int i = 0; i < 32; i++) out[(row + 8 * (i / 2 % 2)) * 64 + i / 4 * 8 + column + i % 2] = d[i];
}
KERNEL(product_of_shared, 128)(float* out, const char* image, int bytes, int64_t a, int64_t b) {
  DYNAMIC_SHARED(char, memory);
  const Memory shared = bring(memory, image, bytes);
  float d[32];
  warpgroup_fence();
  multiply_tiles<Bf16, 64>(d, uint64_t(a) + shared.start, uint64_t(b) + shared.start, false);
  warpgroup_commit();
  warpgroup_wait<0>(d);
  store(out, d);
}
KERNEL_EXPORT(product_of_shared)
KERNEL(product_of_registers, 128)(float* out, const char* image, int bytes, const uint32_t* rows, int64_t b) {
  DYNAMIC_SHARED(char, memory);
  const Memory shared = bring(memory, image, bytes);
  const int row = int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4, pair = int(threadIdx.x) % 4;
  FragmentA x;
  for (int i = 0; i < 4; i++) x.a[i] = rows[(row + 8 * (i % 2)) * 8 + pair + 4 * (i / 2)];
  float d[32];
  warpgroup_fence();
  multiply_tiles<Bf16, 64>(d, x, uint64_t(b) + shared.start, false);
  warpgroup_commit();
  warpgroup_wait<0>(d);
  store(out, d);
}
KERNEL_EXPORT(product_of_registers)
"""
IMAGE_BYTES = 8192
OF_SHARED = Kernel("products.cu", "product_of_shared", "ppill", only_for="sm_90a")
OF_REGISTERS = Kernel("products.cu", "product_of_registers", "ppipl", only_for="sm_90a")

Modes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A canonical layout in CuTe's words for 64 x 16 elements of 2 bytes: ((…), (…)) shapes and strides of the
    dimension that is not k and of k; `swizzle`: B of Swizzle<B, 4, 3>; offsets in elements."""

    shape: Modes
    stride: Modes
    swizzle: int
    leading: int
    stride_offset: int

    def offsets(self) -> NDArray[np.int64]:
        """Bytes of [64, 16] elements."""
        rows, columns = (_offsets(*mode) for mode in zip(self.shape, self.stride, strict=True))
        found = 2 * (rows[:, None] + columns[None, :])
        return found ^ (found >> 3 & ((1 << self.swizzle) - 1) << 4)

    def descriptor(self, start: int) -> int:
        mode = {0: 0, 3: 1, 2: 2, 1: 3}[self.swizzle]
        bits = start >> 4 | 2 * self.leading >> 4 << 16 | 2 * self.stride_offset >> 4 << 32 | mode << 62
        return bits - (1 << 64) if bits >> 63 else bits


def _offsets(shape: tuple[int, ...], stride: tuple[int, ...]) -> NDArray[np.int64]:
    """Of the coordinates of one mode, the first one fastest."""
    found = np.zeros(1, np.int64)
    for size, step in zip(shape, stride, strict=True):
        found = (np.arange(size)[:, None] * step + found[None, :]).reshape(-1)
    return found


# "Canonical Layouts" of wgmma with T = 8; where a stride is free it is not the tightest one.
K_MAJOR = {
    "none": Layout(shape=((8, 8), (8, 2)), stride=((8, 128), (1, 64)), swizzle=0, leading=64, stride_offset=128),
    "32 bytes": Layout(shape=((8, 8), (8, 2)), stride=((16, 256), (1, 8)), swizzle=1, leading=8, stride_offset=256),
    "64 bytes": Layout(shape=((8, 8), (8, 2)), stride=((32, 256), (1, 8)), swizzle=2, leading=8, stride_offset=256),
    "128 bytes": Layout(shape=((8, 8), (8, 2)), stride=((64, 512), (1, 8)), swizzle=3, leading=8, stride_offset=512),
}
MN_MAJOR = {
    "none": Layout(shape=((8, 1, 8), (8, 2)), stride=((1, 8, 64), (8, 512)), swizzle=0, leading=512, stride_offset=64),
    "32 bytes": Layout(
        shape=((8, 2, 4), (8, 2)), stride=((1, 8, 128), (16, 512)), swizzle=1, leading=128, stride_offset=512
    ),
    "64 bytes": Layout(
        shape=((8, 4, 2), (8, 2)), stride=((1, 8, 256), (32, 512)), swizzle=2, leading=256, stride_offset=512
    ),
    "128 bytes": Layout(
        shape=((8, 8, 1), (8, 2)), stride=((1, 8, 0), (64, 512)), swizzle=3, leading=8, stride_offset=512
    ),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    directory = tmp_path_factory.mktemp("products")
    for path in SOURCES.iterdir():
        (directory / path.name).write_text(path.read_text())
    (directory / "products.cu").write_text(SOURCE)
    return Compiler(directory / "libraries", sources=directory)


@pytest.fixture
def launcher(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    if not ON_GPU:
        return EmulatedLauncher(compiler, order=7)
    gpu_launcher(monkeypatch)  # skips the test where there is none
    import torch

    driver = DriverLauncher(compiler, (9, 0), lambda: int(torch.cuda.current_stream().cuda_stream))
    return MirroringLauncher(driver, TorchMemory(), monkeypatch)


def place(image: NDArray[np.uint16], matrix: NDArray[Any], layout: Layout, start: int) -> None:
    offsets = layout.offsets()
    assert len(np.unique(offsets)) == offsets.size
    image[(start + offsets) // 2] = matrix


def run(launcher: Launcher, kernel: Kernel, image: NDArray[np.uint16], *operands: int) -> NDArray[np.float32]:
    out = np.zeros((64, 64), np.float32)
    arguments = kernel.arguments(arrays.address(out), arrays.address(image), image.nbytes, *operands)
    launcher.launch(kernel, (1,), (128,), image.nbytes + 1024, arguments)
    return out


def matrices() -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.float32]]:
    """A[64, 16], B[64, 16] (of 64 columns) and A Bᵀ."""
    rng = np.random.default_rng(3)
    a, b = (narrowed(rng.normal(size=(64, 16)), "bf16") for _ in range(2))
    return a, b, widened(a) @ widened(b).T


@pytest.mark.parametrize("mode", K_MAJOR)
def test_rows_along_k_are_read_by_every_swizzle(launcher: Launcher, mode: str) -> None:
    a, b, expected = matrices()
    layout = K_MAJOR[mode]
    image = np.full(2 * IMAGE_BYTES // 2, 0x7FC0, np.uint16)
    place(image, a, layout, 0)
    place(image, b, layout, IMAGE_BYTES)
    out = run(launcher, OF_SHARED, image, layout.descriptor(0), layout.descriptor(IMAGE_BYTES))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MN_MAJOR)
def test_rows_along_the_columns_are_read_by_every_swizzle(launcher: Launcher, mode: str) -> None:
    a, b, expected = matrices()
    layout = MN_MAJOR[mode]
    image = np.full(2 * IMAGE_BYTES // 2, 0x7FC0, np.uint16)
    place(image, b, layout, 1024)
    out = run(launcher, OF_REGISTERS, image, arrays.address(a), layout.descriptor(1024))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_steps_along_k_advance_the_start_inside_of_the_swizzle_pattern(launcher: Launcher) -> None:
    rng = np.random.default_rng(4)
    rows = [narrowed(rng.normal(size=(64, 64)), "bf16") for _ in range(2)]
    wide = Layout(shape=((8, 8), (64,)), stride=((64, 512), (1,)), swizzle=3, leading=8, stride_offset=512)
    image = np.zeros(2 * IMAGE_BYTES // 2, np.uint16)
    for start, matrix in zip((0, IMAGE_BYTES), rows, strict=True):
        place(image, matrix, wide, start)
    for step in range(4):
        a, b = (wide.descriptor(start + 32 * step) for start in (0, IMAGE_BYTES))
        expected = widened(rows[0])[:, 16 * step :][:, :16] @ widened(rows[1])[:, 16 * step :][:, :16].T
        np.testing.assert_allclose(run(launcher, OF_SHARED, image, a, b), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("start", "says"),
    [(IMAGE_BYTES - 1024 + 2048, "beyond the shared memory"), (256, "starts inside of its swizzle pattern")],
)
def test_a_matrix_in_the_wrong_place_is_an_error_of_the_emulation(compiler: Compiler, start: int, says: str) -> None:
    layout = K_MAJOR["128 bytes"]
    image = np.zeros(IMAGE_BYTES // 2, np.uint16)
    with pytest.raises(EmulationError, match=says):
        run(EmulatedLauncher(compiler), OF_SHARED, image, layout.descriptor(0), layout.descriptor(start))
