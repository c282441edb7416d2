"""CudaModel: one step's forward pass, as launches of tokring's kernels and of matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokring.engine.cuda.attention import Chunks, Lanes, LayerCache, Looks, PagedAttention
from tokring.engine.cuda.backend import Device
from tokring.engine.cuda.weights import DeviceLinear
from tokring.models.decoder import Attention, Decoder, DecoderLayer
from tokring.models.errors import ModelError
from tokring_kernels.cuda.attention import KvFormat
from tokring_kernels.cuda.ops import CudaOps

ACTIVATION = torch.bfloat16
CACHE_DTYPES: dict[KvFormat, torch.dtype] = {"same": ACTIVATION, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def kv_vector_bytes(kv_format: KvFormat, head_dim: int) -> int:
    """Bytes of one head's key or value in the cache, with its scale."""
    return head_dim * CACHE_DTYPES[kv_format].itemsize + (0 if kv_format == "same" else 4)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer what is not in its description: vectors and tables on the device, float32."""

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    attention_output_norm: torch.Tensor | None
    mlp_output_norm: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    cosine: torch.Tensor
    sine: torch.Tensor


class CudaModel:
    """A decoder on a device with buffers for `max_rows` rows of activations, of which `max_logits` get logits.

    The residual stream is float32, everything else bfloat16. Pointers never change, so a forward pass can be captured.
    """

    def __init__(
        self,
        decoder: Decoder[DeviceLinear],
        embedding_table: torch.Tensor,
        device: Device,
        ops: CudaOps,
        *,
        max_rows: int,
        max_lanes: int,
        max_logits: int,
        kv_format: KvFormat = "same",
        warpgroups: bool = False,
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._ops = ops
        self._embedding = embedding_table
        self._tables: dict[int, torch.Tensor] = {}  # by the id of the host's array: layers share RoPE tables
        self._weights = [self._upload_layer(layer) for layer in decoder.layers]
        self._final_norm = self._upload(decoder.final_norm)
        if decoder.head.bias is not None:
            raise ModelError("a head with a bias is not built for CUDA: use --device cpu")
        self.vocab_size = decoder.widths.vocabulary
        widths = decoder.widths
        self._residual = self._buffer(max_rows, widths.hidden, torch.float32)
        self._normed = self._buffer(max_rows, widths.hidden)
        self._branch = self._buffer(max_rows, widths.hidden)
        self._qkv = self._buffer(max_rows, widths.qkv)
        self._query = self._buffer(max_rows, widths.query)
        self._attended = self._buffer(max_rows, widths.query)
        self._gate_up = self._buffer(max_rows, 2 * widths.intermediate)
        self._gated = self._buffer(max_rows, widths.intermediate)
        self._final = self._buffer(max_logits, widths.hidden)
        self.logits = self._buffer(max_logits, widths.vocabulary, torch.float32)  # of the last step
        self._attention = PagedAttention(
            device, decoder.layers[0].attention, max_lanes, kv_format, warpgroups=warpgroups
        )
        self._kv_format: KvFormat = kv_format
        self.caches: Sequence[LayerCache] = ()

    def allocate_caches(self, num_blocks: int) -> None:
        """Reserve keys and values of every layer."""
        attention = self._decoder.layers[0].attention
        shape = (num_blocks, attention.num_kv_heads, 16, attention.head_dim)

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device.torch_device)

        dtype = CACHE_DTYPES[self._kv_format]
        scales = self._kv_format != "same"
        self.caches = [
            LayerCache(
                zeros(shape, dtype),
                zeros(shape, dtype),
                *((zeros(shape[:-1], torch.float32), zeros(shape[:-1], torch.float32)) if scales else ()),
            )
            for _ in self._decoder.layers
        ]

    def forward(self, lanes: Lanes | None, chunks: Chunks | None, rows: torch.Tensor | None) -> torch.Tensor:
        """Write the KV of all tokens; float32 logits [len(rows), vocab_size] of those rows, or of every one.

        Row numbers count the lanes first. The result is the model's buffer.
        """
        num_lanes = 0 if lanes is None else lanes.count
        count = num_lanes + (0 if chunks is None else chunks.count)
        decoder, ops = self._decoder, self._ops
        residual, normed = self._residual[:count], self._normed[:count]
        for part, stop in ((lanes, num_lanes), (chunks, count)):
            if part is not None:
                ops.embed(
                    residual[stop - part.count : stop], part.token_ids, self._embedding, scale=decoder.embedding_scale
                )
        ops.rms_norm(normed, residual, self._weights[0].attention_norm, decoder.norm_eps)
        for index, layer in enumerate(decoder.layers):
            self._attend(index, layer.attention, lanes, chunks, num_lanes, count)
            weights = self._weights[index]
            self._join(count, weights.attention_output_norm, weights.mlp_norm)
            self._mlp(layer, count)
            if index + 1 < len(self._weights):
                self._join(count, weights.mlp_output_norm, self._weights[index + 1].attention_norm)
        return self._head(count, rows)

    def _attend(
        self,
        index: int,
        attention: Attention[DeviceLinear],
        lanes: Lanes | None,
        chunks: Chunks | None,
        num_lanes: int,
        count: int,
    ) -> None:
        """normed -> branch."""
        ops, weights, cache = self._ops, self._weights[index], self.caches[index]
        self._apply(attention.qkv, self._normed[:count], self._qkv[:count])
        shape = (count, attention.num_heads, attention.head_dim)
        query, attended = self._query[:count].view(shape), self._attended[:count].view(shape)
        for part, start, stop in ((lanes, 0, num_lanes), (chunks, num_lanes, count)):
            if part is not None:
                ops.rope_and_write_kv(
                    query[start:stop],
                    self._qkv[start:stop],
                    cache.keys,
                    cache.values,
                    weights.cosine,
                    weights.sine,
                    part.positions,
                    part.slots,
                    query_norm=weights.query_norm,
                    key_norm=weights.key_norm,
                    epsilon=attention.norm_eps,
                    key_scale=cache.key_scale,
                    value_scale=cache.value_scale,
                )
        looks = Looks(scale=attention.scale, window=attention.sliding_window, soft_cap=attention.soft_cap)
        if lanes is not None:
            self._attention.decode(attended[:num_lanes], query[:num_lanes], cache, lanes, looks)
        if chunks is not None:
            self._attention.prefill(attended[num_lanes:], query[num_lanes:], cache, chunks, looks)
        # Tensor parallel: the ranks' outputs are summed here, and behind `down`.
        self._apply(attention.output, self._attended[:count], self._branch[:count])

    def _mlp(self, layer: DecoderLayer[DeviceLinear], count: int) -> None:
        """normed -> branch."""
        mlp, gate_up, gated = layer.mlp, self._gate_up[:count], self._gated[:count]
        self._apply(mlp.gate_up, self._normed[:count], gate_up)
        if mlp.activation == "silu":
            self._ops.silu_mul(gated, gate_up)
        else:
            self._ops.gelu_tanh_mul(gated, gate_up)
        self._apply(mlp.down, gated, self._branch[:count])

    def _join(self, count: int, branch_norm: torch.Tensor | None, next_norm: torch.Tensor) -> None:
        """Add the branch to the residual stream; its norm for what comes next -> normed."""
        self._ops.add_rms_norm(
            self._normed[:count],
            self._residual[:count],
            self._branch[:count],
            next_norm,
            self._decoder.norm_eps,
            branch_weight=branch_norm,
        )

    def _head(self, count: int, rows: torch.Tensor | None) -> torch.Tensor:
        num_logits = count if rows is None else len(rows)
        final, logits = self._final[:num_logits], self.logits[:num_logits]
        self._ops.add_rms_norm(
            final,
            self._residual[:count],
            self._branch[:count],
            self._final_norm,
            self._decoder.norm_eps,
            branch_weight=self._weights[-1].mlp_output_norm,
            rows=rows,
        )
        self._device.product(logits, final, self._decoder.head.weight, None)
        if self._decoder.final_soft_cap:
            self._ops.widen_logits(logits, logits, soft_cap=self._decoder.final_soft_cap)
        return logits

    def _apply(self, linear: DeviceLinear, x: torch.Tensor, out: torch.Tensor) -> None:
        self._device.product(out, x, linear.weight, linear.bias)

    def _buffer(self, num_rows: int, width: int, dtype: torch.dtype = ACTIVATION) -> torch.Tensor:
        return torch.zeros(num_rows, width, dtype=dtype, device=self._device.torch_device)

    def _upload(self, array: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device.torch_device)

    def _upload_table(self, array: NDArray[np.float32]) -> torch.Tensor:
        if id(array) not in self._tables:
            self._tables[id(array)] = self._upload(array)
        return self._tables[id(array)]

    def _upload_layer(self, layer: DecoderLayer[DeviceLinear]) -> LayerWeights:
        def optional(array: NDArray[np.float32] | None) -> torch.Tensor | None:
            return None if array is None else self._upload(array)

        return LayerWeights(
            attention_norm=self._upload(layer.attention_norm),
            mlp_norm=self._upload(layer.mlp_norm),
            attention_output_norm=optional(layer.attention_output_norm),
            mlp_output_norm=optional(layer.mlp_output_norm),
            query_norm=optional(layer.attention.query_norm),
            key_norm=optional(layer.attention.key_norm),
            cosine=self._upload_table(layer.attention.rope.cos),
            sine=self._upload_table(layer.attention.rope.sin),
        )
