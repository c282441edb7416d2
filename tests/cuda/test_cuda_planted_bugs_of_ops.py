"""The tests of the ops catch bugs: each is planted in a copy of the sources, and at least one thread order shows it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.cuda import test_cuda_elementwise, test_cuda_logits, test_cuda_rope_kv, test_cuda_sampling
from tests.cuda.variants import LONG

from tokring_kernels.cuda.compiler import SOURCES, Compiler
from tokring_kernels.cuda.launcher import EmulatedLauncher, EmulationError
from tokring_kernels.cuda.ops import CudaOps


@dataclass(frozen=True)
class Bug:
    """`good` stands once in the source and becomes `bad`; `check` fails with it."""

    name: str
    source: str
    good: str
    bad: str
    check: Callable[[CudaOps], None]


def check_tokens(ops: CudaOps) -> None:
    test_cuda_sampling.test_the_token_is_the_cpu_kernels_token(ops, 3001, "wide")


def check_flat_tokens(ops: CudaOps) -> None:
    test_cuda_sampling.test_the_token_is_the_cpu_kernels_token(ops, 3001, "flat")


def check_logprobs(ops: CudaOps) -> None:
    test_cuda_sampling.test_logprobs_equal_the_reference(ops, 1001, 5, True)


def check_masks(ops: CudaOps) -> None:
    test_cuda_logits.test_a_bitmask_leaves_only_what_it_allows(ops, 33)


def check_norm(ops: CudaOps) -> None:
    test_cuda_elementwise.test_add_rms_norm_normalises_the_branch_first(ops, "f32")


def check_cached_keys(ops: CudaOps) -> None:
    test_cuda_rope_kv.test_queries_rotate_and_keys_and_values_are_cached(ops, "bf16", 64, 64, False)


BUGS = [
    Bug(
        "norm: both sums in one array without a barrier between",
        "residual.cu",
        "SHARED_ARRAY(float, partial, kMaxWarps);",
        "float* const partial = branch_partial;",
        check_norm,
    ),
    Bug(
        "rotation: a token without a slot is cached",
        "rope_kv.cu",
        "if (!is_query && slot < 0) return;",
        "",
        check_cached_keys,
    ),
    Bug(
        "rotation: a shuffle that half of the lanes miss",
        "rope_kv.cu",
        "  if (!is_value) {\n",
        "  if (lane() < 16) warp_sum(1.0f);\n  if (!is_value) {\n",
        check_cached_keys,
    ),
    Bug(
        "scan: no barrier before the warps' sums are read",
        "block.cuh",
        "= upto;\n  block_barrier();",
        "= upto;",
        check_tokens,
    ),
    Bug(
        "walk: the last ids are forgotten",
        "logits.cuh",
        "if (tail + rank < stop)",
        "if (tail + rank < stop - 1)",
        check_tokens,
    ),
    Bug(
        "histogram: counted before all of it is cleared",
        "select.cuh",
        "= 0;\n    block_barrier();",
        "= 0;",
        check_tokens,
    ),
    Bug(
        "histogram: sums without the middle bits",
        "select.cuh",
        "if (shift == 21) atomic_add",
        "if (false) atomic_add",
        check_flat_tokens,
    ),
    Bug(
        "maxima: no barrier before the warps' are read",
        "logits.cu",
        "= best.id;\n  block_barrier();",
        "= best.id;",
        check_tokens,
    ),
    Bug(
        "counts: counted before the row is cleared",
        "logits.cu",
        "row[id] = 0;\n  block_barrier();",
        "row[id] = 0;",
        test_cuda_logits.test_counts_of_history_and_of_sampled_tokens,
    ),
    Bug(
        "counts: lanes that rest are counted",
        "logits.cu",
        "slots[lane] < 0 || lengths[lane] <= 0) return;",
        "slots[lane] < 0) return;",
        test_cuda_logits.test_counts_of_history_and_of_sampled_tokens,
    ),
    Bug(
        "bans: the tail is read one token too late",
        "logits.cu",
        "length + i) % kTail",
        "length + i + 1) % kTail",
        test_cuda_logits.test_a_word_is_banned_where_it_would_be_completed,
    ),
    Bug(
        "masks: entries in the order of lanes, not of their rows",
        "logits.cu",
        "rows ? rows[lane] : lane",
        "rows ? lane : lane",
        check_masks,
    ),
    Bug(
        "logprobs: of ties the first to arrive",
        "logprobs.cu",
        "a.key > b.key : a.id < b.id",
        "a.key > b.key : false",
        check_logprobs,
    ),
]


@pytest.mark.skipif(not LONG, reason="a compilation for each bug: make check-cuda")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "sources")
    path = tmp_path / "sources" / bug.source
    text = path.read_text()
    assert text.count(bug.good) == 1
    path.write_text(text.replace(bug.good, bug.bad))
    compiler = Compiler(tmp_path / "libraries", sources=tmp_path / "sources")
    caught = 0
    for order in (0, 1, 7):
        try:
            with np.errstate(invalid="ignore"):
                bug.check(CudaOps(EmulatedLauncher(compiler, order=order)))
        except (AssertionError, EmulationError):
            caught += 1
    assert caught
