"""A batch for the CUDA attention kernels, and its numpy reference."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokring_kernels import reference
from tokring_kernels.cuda import arrays, attention
from tokring_kernels.cuda.attention import AttentionShape
from tokring_kernels.cuda.launcher import Launcher

BLOCK = 16
NOT_A_BLOCK = 2**30  # reading it ends the process, or AddressSanitizer's report
# Per output vector, in the Euclidean norm: what rounding output and softmax weights to 16 bits costs.
TOLERANCE = {"Bf16": 6e-3, "F16": 1e-3}


def e4m3_values() -> NDArray[np.float32]:
    """The float of each fp8 e4m3 code; the NaN codes as the kernels read them."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


def to_element(x: NDArray[np.float32], element: str) -> NDArray[Any]:
    return reference.narrow(x) if element == "Bf16" else x.astype(np.float16)


@dataclass(kw_only=True)
class Case:
    """Sequences in shuffled blocks of one cache; slots that no token owns hold NaN, or a NaN scale.

    lengths: tokens in the cache; num_queries: of each sequence, its last ones.
    """

    lengths: list[int]
    num_queries: list[int]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    element: str = "Bf16"
    kv_format: str = "same"
    window: int = 0
    soft_cap: float = 0.0
    seed: int = 0
    caches: list[NDArray[Any]] = field(init=False)
    scales: list[NDArray[np.float32]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        widths = [-(-length // BLOCK) for length in self.lengths]
        self.num_blocks = sum(widths) + 3
        ids = rng.permutation(self.num_blocks).astype(np.int32)
        self.block_table = np.full((len(widths), max(widths) + 1), NOT_A_BLOCK, np.int32)
        owned = np.zeros((self.num_blocks, BLOCK), bool)
        for seq, width in enumerate(widths):
            self.block_table[seq, :width], ids = ids[:width], ids[width:]
            for position in range(self.lengths[seq]):
                owned[self.block_table[seq, position // BLOCK], position % BLOCK] = True
        self.seq_lens = np.array(self.lengths, np.int32)
        self.query_start = np.cumsum([0, *self.num_queries]).astype(np.int32)
        shape = (self.num_blocks, self.num_kv_heads, BLOCK, self.head_dim)
        values = [rng.normal(size=shape).astype(np.float32) for _ in range(2)]
        stale = np.broadcast_to(~owned[:, None, :], shape[:3])
        self._fill(values, stale)
        query = rng.normal(size=(self.query_start[-1], self.num_heads, self.head_dim)).astype(np.float32) * 2
        self.query = to_element(query, self.element)
        self.scale = self.head_dim**-0.5
        self.shape = AttentionShape(
            element=self.element,  # type: ignore[arg-type]
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            kv_format=self.kv_format,  # type: ignore[arg-type]
        )

    def _fill(self, values: list[NDArray[np.float32]], stale: NDArray[np.bool_]) -> None:
        """Sets caches, scales and `read`: what the caches mean, as float32."""
        self.scales, self.caches, self.read = [], [], []
        for wide in values:
            if self.kv_format == "same":
                wide[stale] = np.nan
                cache = to_element(wide, self.element)
                scale = np.zeros(0, np.float32)
                self.read.append(reference.as_f32(cache))
            else:
                codes = e4m3_values() if self.kv_format == "fp8" else np.arange(256).astype(np.uint8).view(np.int8)
                scale = np.abs(wide).max(axis=-1) / np.float32(codes.max() if self.kv_format == "int8" else 448)
                scaled = wide / scale[..., None]
                order = np.argsort(codes.astype(np.float32), kind="stable")
                sorted_codes = codes.astype(np.float32)[order]
                nearest = np.clip(np.searchsorted(sorted_codes, scaled), 1, 255)
                lower = scaled - sorted_codes[nearest - 1] < sorted_codes[nearest] - scaled
                cache = order[nearest - lower].astype(np.uint8)
                scale[stale] = np.nan
                cache[stale] = 0x7F
                self.read.append(codes.astype(np.float32)[cache] * scale[..., None])
            self.caches.append(cache)
            self.scales.append(scale)

    def expected(self) -> NDArray[np.float64]:
        caches = [np.where(np.isnan(cache), np.float32(0), cache) for cache in self.read]
        options: dict[str, Any] = {"sliding_window": self.window, "soft_cap": self.soft_cap}
        present = [seq for seq, length in enumerate(self.lengths) if length]
        starts = np.cumsum([0, *(self.num_queries[seq] for seq in present)]).astype(np.int32)
        rows = np.repeat(np.array(self.lengths) > 0, self.num_queries)
        query = reference.as_f32(self.query)
        out = np.zeros(query.shape)
        out[rows] = reference.paged_attention(
            query[rows], *caches, self.block_table[present], starts, self.seq_lens[present], self.scale, **options
        )
        return out

    def decode(self, launcher: Launcher, num_multiprocessors: int = 1) -> NDArray[Any]:
        """Runs the decode kernel twice with one workspace; both times must agree."""
        size = attention.decode_workspace_bytes(self.shape, len(self.lengths), num_multiprocessors)
        workspace = np.full(size, 0xFF, np.uint8)
        workspace[: 4 << 16] = 0
        outs = [np.full(self.query.shape, 0xFFFF, np.uint16).view(self.query.dtype) for _ in range(2)]
        for out in outs:
            attention.paged_decode(
                launcher,
                self.shape,
                out=arrays.address(out),
                workspace=arrays.address(workspace),
                num_multiprocessors=num_multiprocessors,
                lengths=arrays.address(self.seq_lens),
                num_rows=len(self.lengths),
                **self._common(),
            )
        assert not workspace[: 4 << 16].any(), "the counters must end at zero"
        np.testing.assert_array_equal(outs[0].view(np.uint16), outs[1].view(np.uint16))
        return outs[0]

    def prefill(self, launcher: Launcher, *, warpgroups: bool = False) -> NDArray[Any]:
        out = np.full(self.query.shape, 0xFFFF, np.uint16).view(self.query.dtype)
        attention.paged_prefill(
            launcher,
            self.shape,
            out=arrays.address(out),
            query_starts=arrays.address(self.query_start),
            lengths=arrays.address(self.seq_lens),
            num_sequences=len(self.lengths),
            longest_run=max(self.num_queries),
            warpgroups=warpgroups,
            **self._common(),
        )
        return out

    def _common(self) -> dict[str, Any]:
        return {
            "query": arrays.address(self.query),
            "key_cache": arrays.address(self.caches[0]),
            "value_cache": arrays.address(self.caches[1]),
            "key_scale": arrays.address(self.scales[0]),
            "value_scale": arrays.address(self.scales[1]),
            "block_table": arrays.address(self.block_table),
            "table_width": self.block_table.shape[1],
            "scale": self.scale,
            "window": self.window,
            "soft_cap": self.soft_cap,
        }

    def check(self, out: NDArray[Any]) -> None:
        got, expected = reference.as_f32(out).astype(np.float64), self.expected()
        error = np.linalg.norm(got - expected, axis=-1)
        allowed = TOLERANCE[self.element] * np.linalg.norm(expected, axis=-1) + 1e-6
        assert (error <= allowed).all(), f"worst error {np.max(error / allowed):.3g} of the allowed one"
