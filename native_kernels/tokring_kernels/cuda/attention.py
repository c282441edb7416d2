"""Launching paged attention. Arrays are addresses here (ints); shapes are in each docstring and in the .cu files."""

import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

from tokring_kernels.cuda.kernel import Kernel
from tokring_kernels.cuda.launcher import Launcher

ElementType = Literal["Bf16", "F16"]
KvFormat = Literal["same", "int8", "fp8"]

HEAD_DIMS = (64, 80, 96, 128, 256)
WARPGROUP_HEAD_DIMS = (64, 128, 256)  # of the prefill kernel for Hopper
_KV_FORMATS: tuple[KvFormat, ...] = ("same", "int8", "fp8")
_DECODE_WARPS = 4
_PREFILL_WARPS = 4
_WARPGROUP_ROWS, _WARPGROUP_THREADS = 128, 256
_MIN_SHARE_BLOCKS = 8  # KV blocks below which a split costs more than it brings
_SHARES_PER_MULTIPROCESSOR = 8
_COUNTERS = 1 << 16  # (row, KV head) pairs of a launch, at most
_COUNTER_BYTES = 4 * _COUNTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What paged attention is compiled for, and the head counts it runs with.

    element: of query and output. kv_format: the caches hold the element, int8, or fp8 e4m3; the latter two with a
    float32 scale per vector, [num_blocks, num_kv_heads, 16].
    """

    element: ElementType
    head_dim: int
    num_heads: int
    num_kv_heads: int
    kv_format: KvFormat = "same"

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim {self.head_dim}: the CUDA kernels are built for {HEAD_DIMS}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def has_warpgroup_prefill(self) -> bool:
        """Whether the prefill kernel for Hopper knows it."""
        return self.head_dim in WARPGROUP_HEAD_DIMS and self.kv_format == "same"

    @property
    def head_tiles(self) -> int:
        """Tiles of 8 query heads that one thread block of the decode kernel takes."""
        return 2 if self.group > 8 and self.head_dim <= 128 else 1

    @property
    def decode_columns(self) -> int:
        """Thread blocks over the heads: grid.y of the decode kernel."""
        return self.num_kv_heads * -(-self.group // (8 * self.head_tiles))


def _defines(element: ElementType, head_dim: int, kv_format: KvFormat) -> tuple[tuple[str, str | int], ...]:
    return (("ELEMENT", element), ("HEAD_DIM", head_dim), ("KV_FORMAT", _KV_FORMATS.index(kv_format)))


@cache
def decode_kernel(element: ElementType, head_dim: int, kv_format: KvFormat, head_tiles: int) -> Kernel:
    return Kernel(
        "paged_decode.cu",
        "paged_decode",
        "ppppppppppp" + "iiiiiiiff",
        (*_defines(element, head_dim, kv_format), ("HEAD_TILES", head_tiles)),
        max_registers=255 if head_tiles == 2 or head_dim > 128 else 168 if head_dim > 64 else 128,
        tensor_cores=True,
        wide_loads=True,
    )


def decode_workspace_bytes(shape: AttentionShape, max_rows: int, num_multiprocessors: int) -> int:
    """Size of the decode workspace for up to max_rows rows; zeroed once before its first use, then left alone."""
    shares = max_rows + _target_shares(shape, num_multiprocessors)
    return _COUNTER_BYTES + shares * shape.num_heads * (shape.head_dim + 1) * 4


def most_decode_rows(shape: AttentionShape) -> int:
    """Rows that one launch of the decode kernel takes."""
    return _COUNTERS // shape.decode_columns


def _target_shares(shape: AttentionShape, num_multiprocessors: int) -> int:
    return max(1, num_multiprocessors * _SHARES_PER_MULTIPROCESSOR // shape.decode_columns)


def _score_scale(scale: float, soft_cap: float) -> tuple[float, float]:
    """The fields of ScoreScale in paged_attention.cuh."""
    log2_e = math.log2(math.e)
    if soft_cap:
        return 2 * log2_e * scale / soft_cap, soft_cap * log2_e
    return scale * log2_e, 0.0


def paged_decode(
    launcher: Launcher,
    shape: AttentionShape,
    *,
    out: int,
    query: int,
    key_cache: int,
    value_cache: int,
    block_table: int,
    lengths: int,
    workspace: int,
    num_rows: int,
    table_width: int,
    scale: float,
    num_multiprocessors: int,
    window: int = 0,
    soft_cap: float = 0.0,
    key_scale: int = 0,
    value_scale: int = 0,
) -> None:
    """Attention of the last token of each row. Nothing of the launch depends on the lengths: it may be captured.

    out, query: element[num_rows, num_heads, head_dim]; caches: [num_blocks, num_kv_heads, 16, head_dim]; block_table:
    int32[num_rows, table_width]; lengths: int32[num_rows], 0 gives a row of zeros; workspace: see
    decode_workspace_bytes, one for any number of rows, not shared by launches that may overlap.
    """
    columns = shape.decode_columns
    if num_rows > most_decode_rows(shape):
        raise ValueError(f"{num_rows} rows x {columns} head tiles: one launch takes {_COUNTERS} in all")
    kernel = decode_kernel(shape.element, shape.head_dim, shape.kv_format, shape.head_tiles)
    target = _target_shares(shape, num_multiprocessors)
    lse = workspace + _COUNTER_BYTES
    partial = lse + (num_rows + target) * shape.num_heads * 4
    arguments = kernel.arguments(
        out, partial, lse, workspace, query, key_cache, value_cache, key_scale, value_scale, block_table, lengths,
        num_rows, table_width, shape.num_kv_heads, shape.group, target, _MIN_SHARE_BLOCKS, window,
        *_score_scale(scale, soft_cap),
    )  # fmt: skip
    shared_bytes = _DECODE_WARPS * shape.head_tiles * 8 * (shape.head_dim + 6) * 4
    grid = (num_rows + target, columns)
    launcher.launch(kernel, grid, (_DECODE_WARPS * 32,), shared_bytes, arguments)


@cache
def prefill_kernel(element: ElementType, head_dim: int, kv_format: KvFormat) -> Kernel:
    return Kernel(
        "paged_prefill.cu",
        "paged_prefill",
        "pppppppppiiiiff",
        _defines(element, head_dim, kv_format),
        max_registers=255,
        tensor_cores=True,
        wide_loads=True,
    )


@cache
def warpgroup_prefill_kernel(element: ElementType, head_dim: int) -> Kernel:
    """prefill_kernel's twin for Hopper, of WARPGROUP_HEAD_DIMS and caches of the element."""
    return Kernel(
        "paged_prefill_wgmma.cu",
        "paged_prefill_wgmma",
        "pppppppppiiiiff",
        _defines(element, head_dim, "same"),
        max_registers=248 if head_dim <= 128 else 255,
        tensor_cores=True,
        wide_loads=True,
        only_for="sm_90a",
    )


def _warpgroup_prefill_bytes(head_dim: int) -> int:
    """Dynamic shared memory: sizeof(Shared) in paged_prefill_wgmma.cu and what aligning it to 1024 bytes may take."""
    tokens = 128 if head_dim <= 128 else 64
    return 2 * head_dim * (_WARPGROUP_ROWS + 4 * tokens) + 1024


def _prefill_tile(head_dim: int) -> tuple[int, int]:
    """Rows of a thread block and its dynamic shared memory in bytes: kRows and sizeof(Shared) in paged_prefill.cu."""
    rows, tokens = (128, 64) if head_dim <= 128 else (64, 32)
    stride = head_dim if head_dim % 64 == 0 else head_dim + 8
    return rows, 2 * stride * (rows + 4 * tokens) + 4 * 4 * tokens


def paged_prefill(
    launcher: Launcher,
    shape: AttentionShape,
    *,
    out: int,
    query: int,
    key_cache: int,
    value_cache: int,
    block_table: int,
    query_starts: int,
    lengths: int,
    num_sequences: int,
    longest_run: int,
    table_width: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    key_scale: int = 0,
    value_scale: int = 0,
    warpgroups: bool = False,
) -> None:
    """Causal attention of runs of tokens that end their sequences; their keys and values are in the cache already.

    out, query: element[num_tokens, num_heads, head_dim]; query_starts: int32[num_sequences + 1]; lengths:
    int32[num_sequences], of the whole sequences; longest_run: the most tokens that a run has; warpgroups: by the
    kernel for Hopper, which must be shape.has_warpgroup_prefill; the rest as in paged_decode.
    """
    if warpgroups:
        kernel = warpgroup_prefill_kernel(shape.element, shape.head_dim)
        rows, threads, shared_bytes = _WARPGROUP_ROWS, _WARPGROUP_THREADS, _warpgroup_prefill_bytes(shape.head_dim)
    else:
        kernel = prefill_kernel(shape.element, shape.head_dim, shape.kv_format)
        rows, shared_bytes = _prefill_tile(shape.head_dim)
        threads = _PREFILL_WARPS * 32
    arguments = kernel.arguments(
        out, query, key_cache, value_cache, key_scale, value_scale, block_table, query_starts, lengths,
        table_width, shape.num_kv_heads, shape.group, window, *_score_scale(scale, soft_cap),
    )  # fmt: skip
    grid = (-(-longest_run * shape.group // rows), shape.num_kv_heads, num_sequences)
    launcher.launch(kernel, grid, (threads,), shared_bytes, arguments)


def quick_kernels() -> list[Kernel]:
    """A few variants, one of each kind: for the tests that run each time."""
    return [
        decode_kernel("Bf16", 64, "same", 1),
        decode_kernel("F16", 128, "fp8", 2),
        prefill_kernel("Bf16", 128, "same"),
        prefill_kernel("F16", 64, "int8"),
        warpgroup_prefill_kernel("Bf16", 128),
    ]


def all_kernels() -> list[Kernel]:
    """Every variant that a model may ask for."""
    elements: tuple[ElementType, ...] = ("Bf16", "F16")
    prefill = [prefill_kernel(*choice) for choice in product(elements, HEAD_DIMS, _KV_FORMATS)]
    prefill += [warpgroup_prefill_kernel(*choice) for choice in product(elements, WARPGROUP_HEAD_DIMS)]
    return prefill + [
        decode_kernel(element, head_dim, kv_format, head_tiles)
        for element, head_dim, kv_format, head_tiles in product(elements, HEAD_DIMS, _KV_FORMATS, (1, 2))
        if head_tiles == 1 or head_dim <= 128
    ]
