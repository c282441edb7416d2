"""The harness catches bugs: each test plants one in a copy of the sources and sees the emulation or the check fail."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cuda.attention_case import Case
from tests.cuda.variants import LONG

from tokring_kernels.cuda.compiler import SOURCES, Compiler
from tokring_kernels.cuda.launcher import EmulatedLauncher, EmulationError

pytestmark = pytest.mark.timeout(600)  # compilers on a busy machine

ORDERS = (0, 1, 7)


@dataclass(frozen=True)
class Bug:
    """`good` stands once in the source and becomes `bad`; says: part of the emulation's message, "" = wrong numbers."""

    name: str
    source: str
    good: str
    bad: str
    says: str = ""


BUGS = [
    Bug(
        "decode: no barrier before the warps are added up",
        "paged_decode.cu",
        "  block_barrier();\n  const int64_t part_row",
        "  const int64_t part_row",
    ),
    Bug("decode: one token beyond the end is seen", "paged_decode.cu", "token >= share.length", "token > share.length"),
    Bug("decode: stale slots are not cleared", "paged_decode.cu", "values[i].clear();", ";"),
    Bug(
        "decode: shuffle that half of the lanes miss",
        "paged_decode.cu",
        "mask *= 2) most = fmaxf(most, shuffle_xor(most, mask));",
        "mask *= 2) if (lane < 16) most = fmaxf(most, shuffle_xor(most, mask));",
        "lanes of a warp are in different collectives",
    ),
    Bug(
        "prefill: copies are used before they are waited for",
        "paged_prefill.cu",
        "wait_copies<1>();",
        "wait_copies<2>();",
    ),
    Bug(
        "prefill: a stage is filled again before all warps are done with it",
        "paged_prefill.cu",
        "    block_barrier();  // the stage may be filled again\n",
        "",
    ),
    Bug(
        "warpgroups: scores are read before they are waited for",
        "paged_prefill_wgmma.cu",
        "warpgroup_wait<1>(scores);",
        "warpgroup_wait<2>(scores);",
    ),
    Bug(
        "warpgroups: products see copies without a proxy fence",
        "paged_prefill_wgmma.cu",
        "  fence_async_proxy();\n",
        "",
        "without a proxy fence",
    ),
    Bug("warpgroups: 64-byte swizzle", "device.cuh", "uint64_t(1) << 62;", "uint64_t(2) << 62;"),
]
MORE_BUGS = [
    Bug(
        "prefill: no barrier after the wait",
        "paged_prefill.cu",
        "    block_barrier();\n#pragma unroll 1",
        "#pragma unroll 1",
    ),
    Bug("prefill: a token sees the next one", "paged_prefill.cu", "distance < 0 ||", "distance < -1 ||"),
    Bug(
        "prefill: barrier that the last warp misses",
        "paged_prefill.cu",
        "    block_barrier();  // the stage may be filled again\n",
        "    if (warp < 3) block_barrier();\n",
        "different barriers",
    ),
    Bug("decode: wrong byte selector", "paged_decode.cu", "(w[0], w[1], 0x7632)", "(w[0], w[1], 0x7532)"),
    Bug("decode: one share too few", "paged_decode.cu", "(share.split + 1) * each)", "(share.split + 1) * each - 1)"),
    Bug("decode: counter not reset", "paged_decode.cu", "*counter = 0;", ";"),
    Bug("prefill: wrong swizzle", "paged_prefill.cu", "(keys + chunk_place(token,", "(keys + chunk_place(token ^ 1,"),
    Bug("prefill: last copies never waited for", "paged_prefill.cu", "wait_copies<0>();", "wait_copies<1>();"),
    Bug("prefill: window one too wide", "paged_prefill.cu", "distance >= window", "distance > window"),
    Bug(
        "warpgroups: wrong place in the swizzle", "paged_prefill_wgmma.cu", "(chunk ^ row) & 7", "(chunk ^ row + 1) & 7"
    ),
    Bug("warpgroups: wrong stride", "paged_prefill_wgmma.cu", "64 + step % 4 * 16, 1024)", "64 + step % 4 * 16, 512)"),
    Bug("warpgroups: wrong leading stride", "paged_prefill_wgmma.cu", "1024, kCount * 128)", "1024, kCount * 64)"),
    Bug("warpgroups: wrong step along k", "paged_prefill_wgmma.cu", "step % 4 * 16, 1024", "step % 4 * 8, 1024"),
    Bug(
        "warpgroups: matrices where the block's shared memory begins",
        "paged_prefill_wgmma.cu",
        "align_shared<1024>(memory)",
        "align_shared<128>(memory)",
        "starts inside of its swizzle pattern",
    ),
    Bug(
        "warpgroups: no fence between registers and products",
        "paged_prefill_wgmma.cu",
        "    warpgroup_fence();\n    multiply_keys(shared.keys[stage ^ 1]);",
        "    multiply_keys(shared.keys[stage ^ 1]);",
        "without a warpgroup_fence",
    ),
    Bug(
        "warpgroups: weights are replaced while they are multiplied",
        "paged_prefill_wgmma.cu",
        "    warpgroup_wait<0>(outs);\n#pragma unroll",
        "    pack_weights();\n    warpgroup_wait<0>(outs);\n#pragma unroll",
        "an operand changed before the wait",
    ),
    Bug(
        "warpgroups: values go where those in use are",
        "paged_prefill_wgmma.cu",
        "bring(shared.values[stage ^ 1], value_cache",
        "bring(shared.values[stage], value_cache",
    ),
    Bug(
        "warpgroups: no barrier between copies and products",
        "paged_prefill_wgmma.cu",
        "  fence_async_proxy();\n  block_barrier();",
        "  fence_async_proxy();",
        "",
    ),
    Bug(
        "warpgroups: last products never waited for",
        "paged_prefill_wgmma.cu",
        "start > first_start);\n  warpgroup_wait<0>(outs);",
        "start > first_start);",
        "without waiting for its products",
    ),
    Bug("warpgroups: window one too wide", "paged_prefill_wgmma.cu", "uint32_t(window) :", "uint32_t(window + 1) :"),
]


def plant(bug: Bug, directory: Path) -> Compiler:
    for path in SOURCES.iterdir():
        (directory / path.name).write_text(path.read_text())
    source = directory / bug.source
    assert source.read_text().count(bug.good) == 1, f"{bug.source} must hold once: {bug.good}"
    source.write_text(source.read_text().replace(bug.good, bug.bad))
    return Compiler(directory / "libraries", sources=directory, options=("-O1", "-Wno-error"))


def runs_right(run: Callable[[EmulatedLauncher], None], compiler: Compiler, says: str) -> bool:
    """In all thread orders."""
    for order in ORDERS:
        try:
            run(EmulatedLauncher(compiler, order=order))
        except EmulationError as error:
            assert says in str(error)
            return False
        except AssertionError:
            assert not says
            return False
    return True


def decode(launcher: EmulatedLauncher) -> None:
    case = Case(lengths=[1, 15, 200], num_queries=[1] * 3, num_heads=3, num_kv_heads=1, window=150)
    case.check(case.decode(launcher, 4))


def prefill(launcher: EmulatedLauncher) -> None:
    case = Case(lengths=[300, 20], num_queries=[140, 20], num_heads=1, num_kv_heads=1, window=150)
    case.check(case.prefill(launcher))


def warpgroup_prefill(launcher: EmulatedLauncher) -> None:
    case = Case(lengths=[400, 20], num_queries=[140, 20], num_heads=1, num_kv_heads=1, head_dim=128, window=350)
    case.check(case.prefill(launcher, warpgroups=True))


RUNS = {"paged_decode.cu": decode, "paged_prefill.cu": prefill}  # else warpgroup_prefill


@pytest.mark.parametrize("bug", BUGS + MORE_BUGS if LONG else BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    assert not runs_right(RUNS.get(bug.source, warpgroup_prefill), plant(bug, tmp_path), bug.says)


def test_the_sources_without_a_bug_pass_the_same_check(compiler: Compiler) -> None:
    assert runs_right(decode, compiler, "")
    assert runs_right(prefill, compiler, "")
    assert runs_right(warpgroup_prefill, compiler, "")


WILD_BLOCK = """
import sys
from pathlib import Path
from tests.cuda.attention_case import Case
from tokring_kernels.cuda.compiler import Compiler
from tokring_kernels.cuda.launcher import EmulatedLauncher

case = Case(lengths=[100], num_queries=[1])
case.block_table[0, 3] = case.num_blocks
case.decode(EmulatedLauncher(Compiler(Path(sys.argv[1]), options=("-O1", "-fsanitize=address"))))
"""


def test_address_sanitizer_names_the_line_that_reads_a_wild_block(tmp_path: Path) -> None:
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    environment = {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-c", WILD_BLOCK, str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "paged_decode.cu" in done.stderr
