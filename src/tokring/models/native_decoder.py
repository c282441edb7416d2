"""The decoder as one native call per step, for models that the kernel covers; the bits are those of Decoder.forward.

It saves the Python and numpy calls between kernels: 0.8 of 5.4 ms a step with the embedded model at one row.
"""

import tokring_kernels
from tokring.engine.step_batch import StepBatch
from tokring.models.decoder import Decoder, DecoderLayer
from tokring.models.linear import Float32, Linear, NativeLinear


def native_decoder(decoder: Decoder[Linear]) -> tokring_kernels.Decoder | None:
    """The same model in the kernel's terms, sharing its arrays; None where the kernel lacks something it needs."""
    layers = [native_layer(layer) for layer in decoder.layers]
    is_plain = decoder.embedding_scale == 1.0 and not decoder.final_soft_cap
    if not is_plain or None in layers or not isinstance(decoder.head, NativeLinear) or decoder.head.bias is not None:
        return None
    attention = decoder.layers[0].attention
    return tokring_kernels.Decoder(
        [layer for layer in layers if layer is not None],
        embedding=decoder.embedding,
        final_norm=decoder.final_norm,
        head=decoder.head.matrices[0],
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        norm_epsilon=decoder.norm_eps,
        attention_scale=attention.scale,
        activation_bits=decoder.head.activation_bits,
    )


def native_layer(layer: DecoderLayer[Linear]) -> tokring_kernels.DecoderLayer | None:
    """None for other activations, soft caps, further norms or biases, partial rotation and fused or mixed matrices."""
    attention, mlp = layer.attention, layer.mlp
    qkv, output = native_matrices(attention.qkv, 3), native_matrices(attention.output, 1)
    gate_up, down = native_matrices(mlp.gate_up, 2), native_matrices(mlp.down, 1)
    if not (qkv and output and gate_up and down):
        return None
    has_extra_bias = any(has_bias(linear) for linear in (attention.output, mlp.gate_up, mlp.down))
    has_extra_norm = layer.attention_output_norm is not None or layer.mlp_output_norm is not None
    is_partly_rotated = 2 * attention.rope.cos.shape[1] != attention.head_dim
    if mlp.activation != "silu" or attention.soft_cap or has_extra_bias or has_extra_norm or is_partly_rotated:
        return None
    return tokring_kernels.DecoderLayer(
        attention_norm=layer.attention_norm,
        query=qkv[0],
        key=qkv[1],
        value=qkv[2],
        output=output[0],
        mlp_norm=layer.mlp_norm,
        gate=gate_up[0],
        up=gate_up[1],
        down=down[0],
        cosine=attention.rope.cos,
        sine=attention.rope.sin,
        qkv_bias=attention.qkv.bias if isinstance(attention.qkv, NativeLinear) else None,
        query_norm=attention.query_norm,
        key_norm=attention.key_norm,
        sliding_window=attention.sliding_window,
    )


def native_matrices(linear: Linear, count: int) -> list[tokring_kernels.PackedLinear]:
    """The linear's `count` matrices; empty where it has another number of them or mixes their input's forms."""
    if not isinstance(linear, NativeLinear) or len(linear.matrices) != count:
        return []
    is_mixed = len({matrix.input_form for matrix in linear.matrices}) > 1
    return [] if is_mixed else linear.matrices


def has_bias(linear: Linear) -> bool:
    return isinstance(linear, NativeLinear) and linear.bias is not None


def run_native(decoder: tokring_kernels.Decoder, batch: StepBatch, logits: Float32) -> Float32:
    """Decoder.forward's work; fills and returns `logits` [len(batch.logits_index), vocabulary]."""
    decoder.run(
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.block_table,
        batch.query_start,
        batch.seq_lens,
        batch.logits_index,
        logits,
    )
    return logits
