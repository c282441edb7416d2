"""Compile gates, without a GPU: `python -m tokring_kernels.cuda.check [--quick] [--architectures …] [--json FILE]`.

Compiles kernels by NVRTC for each architecture and reads ptxas' report and the disassembly: registers within the
kernel's bound, no spills, no local memory, tensor-core and 128-bit load instructions where the kernel is made for them.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tokring_kernels.cuda import inventory
from tokring_kernels.cuda.compiler import CompileError, Compiler, import_nvrtc
from tokring_kernels.cuda.kernel import Kernel

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
QUICK_ARCHITECTURES = ("sm_80", "sm_90a")


INSTALL = "pip install 'tokring[cuda-check]'"


class ToolMissing(RuntimeError):
    """NVRTC, CuPy or nvdisasm is not installed; the message says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one kernel became for one architecture. spill_bytes: stores and loads; loads_128: from global memory."""

    kernel: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    local_accesses: int
    tensor_core_instructions: int
    loads_128: int
    faults: tuple[str, ...]


def check_kernel(kernel: Kernel, architecture: str, compiler: Compiler) -> Report:
    """Raises CompileError, ToolMissing."""
    return check_module((kernel,), architecture, compiler)[0]


def check_module(kernels: tuple[Kernel, ...], architecture: str, compiler: Compiler) -> list[Report]:
    """Reports on kernels of one source with the same defines, which are compiled and disassembled together."""
    cubin, log = compiler.cubin_and_log(kernels[0], architecture)
    listing = _disassemble(cubin)
    return [_report(kernel, architecture, log, listing) for kernel in kernels]


def _report(kernel: Kernel, architecture: str, log: str, listing: str) -> Report:
    stack_bytes, spill_bytes, registers = _ptxas_report(kernel.function, log)
    opcodes = list(_opcodes(listing, kernel.function))
    local_accesses = sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes)
    products = "HGMMA" if kernel.only_for == "sm_90a" else "HMMA"
    tensor_core_instructions = sum(opcode.startswith(products) for opcode in opcodes)
    loads_128 = sum(opcode.startswith("LDG") and ".128" in opcode for opcode in opcodes)
    faults = []
    if registers > kernel.max_registers:
        faults.append(f"{registers} registers, at most {kernel.max_registers} wanted")
    if spill_bytes or stack_bytes or local_accesses:
        faults.append(f"{spill_bytes} bytes spilled, {stack_bytes} on the stack, {local_accesses} local accesses")
    if kernel.tensor_cores and not tensor_core_instructions:
        faults.append(f"no tensor-core instruction ({products})")
    if serialized := re.search(rf"\((C\d+)\)[^\n]*wgmma[^\n]* serialized [^\n]*'{kernel.function}'", log):
        faults.append(f"ptxas lets the products of a warpgroup wait for each other ({serialized[1]})")
    if kernel.wide_loads and not loads_128:
        faults.append("no 128-bit load")
    return Report(
        kernel=kernel.title,
        architecture=architecture,
        registers=registers,
        stack_bytes=stack_bytes,
        spill_bytes=spill_bytes,
        local_accesses=local_accesses,
        tensor_core_instructions=tensor_core_instructions,
        loads_128=loads_128,
        faults=tuple(faults),
    )


def _ptxas_report(function: str, log: str) -> tuple[int, int, int]:
    """Stack bytes, spilled bytes and registers of a function."""
    pattern = (
        rf"entry function '{function}'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    found = re.search(pattern, log, re.DOTALL)
    if not found:
        raise CompileError(f"ptxas does not report on {function}:\n{log}")
    stack, stores, loads, registers = map(int, found.groups())
    return stack, stores + loads, registers


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_nvdisasm(), "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"nvdisasm cannot read a cubin: {done.stderr}")
    return done.stdout


def _opcodes(listing: str, function: str) -> Iterator[str]:
    """The opcodes of a function with their modifiers, LDG.E.128."""
    ours = False
    for line in listing.splitlines():
        section = re.search(r"\.text\.(\w+)", line)
        if section:
            ours = section[1] == function
        found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
        if ours and found:
            yield found[1]


def _nvdisasm() -> str:
    installed = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "nvdisasm"
    path = str(installed) if installed.exists() else shutil.which("nvdisasm")
    if path is None:
        raise ToolMissing(f"nvdisasm is missing: {INSTALL}")
    return path


def require_nvrtc() -> None:
    """Raises ToolMissing where CuPy or NVRTC can't be loaded, CompileError without a home."""
    try:
        import_nvrtc().getVersion()
    except CompileError:
        raise
    except (ImportError, OSError, RuntimeError) as error:  # CuPy's, and that of its search for libraries
        cause = error.__cause__ or error
        raise ToolMissing(f"NVRTC can't be used by CuPy ({str(cause).splitlines()[0]}): {INSTALL}") from None


Task = tuple[tuple[Kernel, ...], str]  # kernels of one source with the same defines, an architecture


def is_for(kernel: Kernel, architecture: str) -> bool:
    return kernel.only_for in ("", architecture)


def modules_of(kernels: Iterable[Kernel]) -> list[tuple[Kernel, ...]]:
    """Groups of what is compiled together."""
    modules: dict[tuple[object, ...], list[Kernel]] = {}
    for kernel in kernels:
        modules.setdefault((kernel.source, kernel.defines), []).append(kernel)
    return [tuple(module) for module in modules.values()]


def check_tasks(tasks: Sequence[Task], compiler: Compiler, jobs: int) -> Iterator[list[Report]]:
    """The reports on each task's kernels. jobs: processes."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(check_module, *zip(*tasks, strict=True), [compiler] * len(tasks))


def check_all(
    kernels: Iterable[Kernel], architectures: Iterable[str], compiler: Compiler, jobs: int
) -> Iterator[list[Report]]:
    """Reports by kernel, one for each architecture that it is for. jobs: processes."""
    modules, chosen = modules_of(kernels), list(architectures)
    tasks = [[(module, name) for name in chosen if is_for(module[0], name)] for module in modules]
    results = check_tasks([task for of_module in tasks for task in of_module], compiler, jobs)
    for of_module in tasks:
        yield from map(list, zip(*(next(results) for _ in of_module), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tokring_kernels.cuda.check", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few variants, for sm_80 and sm_90a")
    parser.add_argument("--architectures", help=f"comma-separated (default: {','.join(ARCHITECTURES)})")
    parser.add_argument("--json", type=Path, help="write the reports to this file too")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        sys.exit(f"check-cuda: --jobs {arguments.jobs}: must be at least 1")
    chosen = QUICK_ARCHITECTURES if arguments.quick else ARCHITECTURES
    architectures = arguments.architectures.split(",") if arguments.architectures else list(chosen)
    kernels = inventory.quick_kernels() if arguments.quick else inventory.all_kernels()
    try:
        require_nvrtc()
        reports = _print_table(kernels, architectures, arguments.jobs)
    except (CompileError, ToolMissing) as error:
        sys.exit(f"check-cuda: {error}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    faults = [f"{report.kernel} {report.architecture}: {fault}" for report in reports for fault in report.faults]
    print(f"{len(reports)} compilations, {len(faults)} faults")
    if faults:
        sys.exit("\n".join(faults))


def _print_table(kernels: list[Kernel], architectures: list[str], jobs: int) -> list[Report]:
    """One line a kernel: registers by architecture, instructions of the last one; prints as results come."""
    print(f"{'registers':66}", *(f"{architecture:>7}" for architecture in architectures), "  HMMA  LDG.128", flush=True)
    reports: list[Report] = []
    for row in check_all(kernels, architectures, Compiler(), jobs):
        reports += row
        found = {report.architecture: f"{report.registers}{'!' if report.faults else ''}" for report in row}
        cells = (found.get(architecture, "-") for architecture in architectures)
        counts = f"{row[-1].tensor_core_instructions:6} {row[-1].loads_128:8}"
        print(f"{row[0].kernel:66}", *(f"{cell:>7}" for cell in cells), counts, flush=True)
    return reports


if __name__ == "__main__":
    main()
