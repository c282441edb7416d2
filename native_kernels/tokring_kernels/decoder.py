"""A whole decoder step in one native call."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokring_kernels import _cpu
from tokring_kernels.array import Array
from tokring_kernels.linear import PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer: x += output(attention(norm(x))); x += down(silu(gate(norm(x))) * up(norm(x))).

    Norms are float32[hidden]; cosine and sine float32[num_positions, head_dim / 2]. query, key and value are all
    quantized, all BF16 or all F32, so are gate and up.
    """

    attention_norm: Array
    query: PackedLinear
    key: PackedLinear
    value: PackedLinear
    output: PackedLinear
    mlp_norm: Array
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    cosine: Array
    sine: Array
    qkv_bias: Array | None = None  # float32[(num_heads + 2 * num_kv_heads) * head_dim]
    query_norm: Array | None = None  # float32[head_dim], applied to each head before the rotation
    key_norm: Array | None = None
    sliding_window: int = 0  # 0 = all


class Decoder:
    """Embedding, layers, final norm and head over a paged KV cache; one call runs all of a step.

    embedding: float32 or bfloat16 bits [vocab_size, hidden]. Not thread-safe; borrows all arrays given to it.
    A token's logits have the same bits in any batch, as decode or in any chunk of a prefill, for any thread count.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        *,
        embedding: Array,
        final_norm: Array,
        head: PackedLinear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm_epsilon: float,
        attention_scale: float,
        activation_bits: int = 15,
    ) -> None:
        """Raises ValueError where shapes do not fit. activation_bits: see PackedLinear.apply."""
        self._native = _cpu.Decoder(
            embedding,
            final_norm,
            head.native,
            layers[0].gate.outputs,
            num_heads,
            num_kv_heads,
            head_dim,
            norm_epsilon,
            attention_scale,
            activation_bits,
        )
        for layer in layers:
            self._native.add_layer(
                layer.attention_norm,
                layer.query.native,
                layer.key.native,
                layer.value.native,
                layer.output.native,
                layer.mlp_norm,
                layer.gate.native,
                layer.up.native,
                layer.down.native,
                layer.cosine,
                layer.sine,
                layer.qkv_bias,
                layer.query_norm,
                layer.key_norm,
                layer.sliding_window,
            )

    def set_cache(
        self,
        keys: Sequence[Array],
        values: Sequence[Array],
        key_scales: Sequence[Array | None] = (),
        value_scales: Sequence[Array | None] = (),
    ) -> None:
        """Per layer [num_blocks, num_kv_heads, 16, head_dim], all float32, bfloat16 bits or int8.

        Scales, float32[num_blocks, num_kv_heads, 16] per layer, come with int8 caches only. ValueError otherwise.
        """
        none = [None] * len(keys)
        self._native.set_cache(list(keys), list(values), list(key_scales) or none, list(value_scales) or none)

    def run(
        self,
        token_ids: Array,
        positions: Array,
        slot_mapping: Array,
        block_table: Array,
        query_start: Array,
        seq_lens: Array,
        logits_index: Array,
        logits: Array,
        *,
        num_threads: int = 0,
    ) -> None:
        """Writes the KV of all tokens, and logits float32[m, vocab_size] of the tokens logits_index int32[m].

        token_ids, positions: int32[T]; slot_mapping: int64[T]; block_table, query_start, seq_lens as in
        paged_attention. Raises ValueError for an id, position, slot or block out of range, before anything is written.
        """
        self._native.run(
            token_ids,
            positions,
            slot_mapping,
            block_table,
            query_start,
            seq_lens,
            logits_index,
            logits,
            num_threads,
        )
