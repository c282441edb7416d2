"""The compile gates: every kind of kernel passes them, and they see what they are there to see."""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from tokring_kernels.cuda import attention, catalogue, check, inventory
from tokring_kernels.cuda.attention import AttentionShape, ElementType, KvFormat
from tokring_kernels.cuda.compiler import SOURCES, CompileError, Compiler, default_directory
from tokring_kernels.cuda.kernel import Kernel

LOCAL_MEMORY = """
#include "device.cuh"
KERNEL(indexed, 32)(float* out, const int* where) {
  float values[64];
  for (int i = 0; i < 64; i++) values[i] = out[i];
  for (int i = 0; i < 64; i++) values[where[i]] += 1.0f;
  for (int i = 0; i < 64; i++) out[i] = values[where[63 - i]];
}
"""
INDEXED = Kernel("indexed.cu", "indexed", "pp")


@pytest.mark.timeout(600)
def test_every_kind_of_kernel_passes_the_gates(tmp_path: Path) -> None:
    """Attention for both architectures, the others for one of them in turn: `make check-cuda` has all for all."""
    tasks: list[check.Task] = []
    for index, module in enumerate(check.modules_of(inventory.quick_kernels())):
        both = module[0].tensor_cores
        wanted = [name for i, name in enumerate(check.QUICK_ARCHITECTURES) if both or i == index % 2]
        tasks += [(module, name) for name in wanted if check.is_for(module[0], name)]
    reports = [report for part in check.check_tasks(tasks, Compiler(tmp_path), jobs=2) for report in part]
    assert len(reports) == sum(len(module) for module, _ in tasks)
    assert {report.architecture for report in reports} == set(check.QUICK_ARCHITECTURES)
    assert [(r.kernel, r.architecture, r.faults) for r in reports if r.faults] == []


class Asked:
    """A launcher that launches nothing."""

    def __init__(self) -> None:
        self.kernels: set[Kernel] = set()

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        self.kernels.update(kernels)

    def launch(self, kernel: Kernel, *_: Any) -> None:
        self.kernels.add(kernel)


def test_every_variant_that_is_asked_for_at_run_time_passes_the_gates_of_check_cuda() -> None:
    asked, somewhere = Asked(), 1 << 20
    arrays = dict.fromkeys(("out", "query", "key_cache", "value_cache", "block_table", "lengths"), somewhere)
    for element, head_dim, kv_format, group in product(
        get_args(ElementType), attention.HEAD_DIMS, get_args(KvFormat), (1, 2, 7, 8, 9, 16, 17, 71)
    ):
        shape = AttentionShape(
            element=element, head_dim=head_dim, num_heads=2 * group, num_kv_heads=2, kv_format=kv_format
        )
        attention.paged_decode(
            asked, shape, **arrays, workspace=somewhere, num_rows=3, table_width=4, scale=1.0, num_multiprocessors=132
        )
        attention.paged_prefill(
            asked, shape, **arrays, query_starts=somewhere, num_sequences=2, longest_run=9, table_width=4, scale=1.0
        )
    for name, entry in vars(catalogue).items():
        if name.isupper():
            choices = entry.values() if isinstance(entry, dict) else (entry,)
            asked.prepare(kernel for kernel in choices if isinstance(kernel, Kernel))
    assert asked.kernels <= set(inventory.all_kernels())
    assert len(asked.kernels) > 80


def test_the_gates_see_local_memory_and_missing_instructions(tmp_path: Path) -> None:
    for header in SOURCES.glob("*.cuh"):
        (tmp_path / header.name).write_text(header.read_text())
    (tmp_path / INDEXED.source).write_text(LOCAL_MEMORY)
    compiler = Compiler(tmp_path / "cubins", sources=tmp_path)
    wanted = replace(INDEXED, max_registers=8, tensor_cores=True, wide_loads=True)
    faults = " ".join(check.check_kernel(wanted, "sm_80", compiler).faults)
    for fault in ("registers, at most 8", "local accesses", "no tensor-core instruction", "no 128-bit load"):
        assert fault in faults


EARLY_READER = """
#include "device.cuh"
KERNEL(early_reader, 128)(float* out, const uint64_t* matrices) {
  float d[32];
  warpgroup_fence();
  multiply_tiles<Bf16, 64>(d, matrices[0], matrices[1], false);
  out[threadIdx.x] = d[0];
  multiply_tiles<Bf16, 64>(d, matrices[0], matrices[1], true);
  warpgroup_commit();
  warpgroup_wait<0>(d);
  for (int i = 0; i < 32; i++) out[threadIdx.x + 128 * i] = d[i];
}
"""


def test_the_gates_see_products_of_a_warpgroup_that_wait_for_each_other(tmp_path: Path) -> None:
    for header in SOURCES.glob("*.cuh"):
        (tmp_path / header.name).write_text(header.read_text())
    (tmp_path / "early.cu").write_text(EARLY_READER)
    kernel = Kernel("early.cu", "early_reader", "pp", tensor_cores=True, only_for="sm_90a")
    report = check.check_kernel(kernel, "sm_90a", Compiler(tmp_path / "cubins", sources=tmp_path))
    assert report.tensor_core_instructions == 2
    (fault,) = report.faults
    assert fault.startswith("ptxas lets the products of a warpgroup wait for each other (C")


def test_a_source_that_does_not_compile_is_named_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "indexed.cu").write_text("nonsense")
    for header in SOURCES.glob("*.cuh"):
        (tmp_path / header.name).write_text(header.read_text())
    with pytest.raises(CompileError, match=r"indexed\.cu(.|\n)*nonsense"):
        Compiler(tmp_path / "cubins", sources=tmp_path).cubin(INDEXED, "sm_80")


def test_a_directory_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CompileError, match=r"kept in .*file.* \(Not a directory\): set XDG_CACHE_HOME"):
        Compiler(tmp_path / "file" / "kernels").cubin(inventory.quick_kernels()[0], "sm_80")


def test_without_a_home_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    with pytest.raises(CompileError, match="no home directory .*: set XDG_CACHE_HOME"):
        default_directory()
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_directory() == Path("/somewhere/tokring/kernels")


BUILD_AT_ONCE = """
import sys
from pathlib import Path
from tokring_kernels.cuda.compiler import Compiler
from tokring_kernels.cuda.kernel import Kernel

sources, cubins = map(Path, sys.argv[1:])
sys.stdin.read()
image, log = Compiler(cubins, sources=sources).cubin_and_log(Kernel("indexed.cu", "indexed", "pp"), "sm_80")
sys.exit(not image.startswith(b"\\x7fELF") or "indexed" not in log)
"""


def test_processes_that_compile_the_same_kernel_at_once_all_get_it(tmp_path: Path) -> None:
    for header in SOURCES.glob("*.cuh"):
        (tmp_path / header.name).write_text(header.read_text())
    (tmp_path / INDEXED.source).write_text(LOCAL_MEMORY)
    command = [sys.executable, "-c", BUILD_AT_ONCE, str(tmp_path), str(tmp_path / "cubins")]
    builders = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
    for builder in builders:
        assert builder.stdin is not None
        builder.stdin.close()
    assert [builder.wait(120) for builder in builders] == [0, 0]
    assert [path.suffix for path in (tmp_path / "cubins").iterdir()] == [".cubin"]


def test_a_cubin_is_compiled_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for header in SOURCES.glob("*.cuh"):
        (tmp_path / header.name).write_text(header.read_text())
    source = tmp_path / INDEXED.source
    source.write_text(LOCAL_MEMORY)
    compiler = Compiler(tmp_path / "cubins", sources=tmp_path)
    first = compiler.cubin(INDEXED, "sm_80")
    assert first.startswith(b"\x7fELF")
    with monkeypatch.context() as patch:
        patch.setattr("tokring_kernels.cuda.compiler._nvrtc", lambda *_: pytest.fail("compiled again"))
        assert Compiler(tmp_path / "cubins", sources=tmp_path).cubin(INDEXED, "sm_80") == first
    source.write_text(LOCAL_MEMORY.replace("1.0f", "2.0f"))
    assert compiler.cubin(INDEXED, "sm_80") != first


@pytest.mark.parametrize("damage", ["empty", "cut off", "one bit"])
def test_a_damaged_cubin_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr("tokring_kernels.cuda.compiler._nvrtc", lambda *_: (b"image", "report"))
    compiler = Compiler(tmp_path)
    kernel = inventory.quick_kernels()[0]
    compiler.cubin(kernel, "sm_80")
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "cut off": whole[:-1], "one bit": whole[:-1] + bytes([whole[-1] ^ 1])}[damage])
    assert compiler.cubin_and_log(kernel, "sm_80") == (b"image", "report")
    assert file.read_bytes() == whole


def test_a_missing_nvrtc_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("Failure finding libnvrtc.so.13\nand where it was looked for")

    monkeypatch.setattr(check, "import_nvrtc", missing)
    monkeypatch.setattr(sys, "argv", ["check", "--quick"])
    with pytest.raises(SystemExit, match=r"^check-cuda: .*\(Failure finding libnvrtc.so.13\): pip install 'tokring"):
        check.main()


@pytest.mark.parametrize("jobs", ["0", "-2"])
def test_jobs_that_can_do_nothing_are_refused_in_one_line(jobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "--quick", "--jobs", jobs])
    with pytest.raises(SystemExit, match=f"^check-cuda: --jobs {jobs}: must be at least 1$"):
        check.main()


def test_importing_the_package_loads_neither_cupy_nor_torch() -> None:
    code = (
        "import sys, tokring_kernels.cuda.launcher, tokring_kernels.cuda.check; "
        "sys.exit(bool({'cupy', 'cupy_backends', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
