"""PagedAttention: the attention kernels on a device's tensors, one for lanes and one for chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokring.engine.cuda.backend import Device
from tokring.engine.cuda.weights import DeviceLinear
from tokring.models.decoder import Attention
from tokring.models.errors import ModelError
from tokring_kernels.cuda.arrays import address
from tokring_kernels.cuda.attention import (
    AttentionShape,
    KvFormat,
    decode_workspace_bytes,
    most_decode_rows,
    paged_decode,
    paged_prefill,
)


class LayerCache(NamedTuple):
    """Keys and values of one layer: [num_blocks, kv_heads, 16, head_dim]; those of 8 bits with a scale per vector."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: torch.Tensor | None = None  # float32 [num_blocks, kv_heads, 16]
    value_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The first rows of a step: one token for each lane. Lanes of length 0 compute nothing that is used."""

    count: int
    token_ids: torch.Tensor  # int32[count]
    positions: torch.Tensor  # int32[count]
    slots: torch.Tensor  # int32[count], -1 where nothing is cached
    block_table: torch.Tensor  # int32[count, max_blocks]
    lengths: torch.Tensor  # int32[count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The rows behind them: runs of prompt tokens."""

    count: int  # tokens
    token_ids: torch.Tensor  # int32[count]
    positions: torch.Tensor  # int32[count]
    slots: torch.Tensor  # int32[count]
    block_table: torch.Tensor  # int32[num_requests, width]
    query_starts: torch.Tensor  # int32[num_requests + 1]
    lengths: torch.Tensor  # int32[num_requests]
    longest_run: int  # most tokens of a request


class Looks(NamedTuple):
    """How a layer looks back."""

    scale: float
    window: int  # 0: all positions
    soft_cap: float  # 0: none


class PagedAttention:
    """Queries and outputs bfloat16[rows, heads, head_dim], contiguous. Launches don't depend on lengths.

    Raises ModelError for more lanes than one launch takes.
    """

    def __init__(
        self,
        device: Device,
        attention: Attention[DeviceLinear],
        max_lanes: int,
        kv_format: KvFormat = "same",
        *,
        warpgroups: bool = False,
    ) -> None:
        """warpgroups: prefill by the kernel for Hopper."""
        self._launcher = device.launcher
        self._num_multiprocessors = device.num_multiprocessors
        self._shape = AttentionShape(
            element="Bf16",
            head_dim=attention.head_dim,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            kv_format=kv_format,
        )
        if max_lanes > (most := most_decode_rows(self._shape)):
            raise ModelError(f"{max_lanes} running requests: CUDA takes {most} of this model; lower --max-num-seqs")
        self._warpgroups = warpgroups
        num_bytes = decode_workspace_bytes(self._shape, max_lanes, device.num_multiprocessors)
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)

    def decode(self, out: torch.Tensor, query: torch.Tensor, cache: LayerCache, lanes: Lanes, looks: Looks) -> None:
        """Each lane's token looks back on its sequence; resting lanes get zeros."""
        paged_decode(
            self._launcher,
            self._shape,
            out=out.data_ptr(),
            query=query.data_ptr(),
            key_cache=cache.keys.data_ptr(),
            value_cache=cache.values.data_ptr(),
            key_scale=address(cache.key_scale),
            value_scale=address(cache.value_scale),
            block_table=lanes.block_table.data_ptr(),
            lengths=lanes.lengths.data_ptr(),
            workspace=self._workspace.data_ptr(),
            num_rows=lanes.count,
            table_width=lanes.block_table.shape[1],
            num_multiprocessors=self._num_multiprocessors,
            **looks._asdict(),
        )

    def prefill(self, out: torch.Tensor, query: torch.Tensor, cache: LayerCache, chunks: Chunks, looks: Looks) -> None:
        """Each token looks back on what is before it in its sequence."""
        paged_prefill(
            self._launcher,
            self._shape,
            out=out.data_ptr(),
            query=query.data_ptr(),
            key_cache=cache.keys.data_ptr(),
            value_cache=cache.values.data_ptr(),
            key_scale=address(cache.key_scale),
            value_scale=address(cache.value_scale),
            block_table=chunks.block_table.data_ptr(),
            query_starts=chunks.query_starts.data_ptr(),
            lengths=chunks.lengths.data_ptr(),
            num_sequences=len(chunks.lengths),
            longest_run=chunks.longest_run,
            warpgroups=self._warpgroups,
            table_width=chunks.block_table.shape[1],
            **looks._asdict(),
        )
