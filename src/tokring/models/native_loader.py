"""Builds the one-call native decoder from a checkpoint, weights kept as they are stored. Needs no torch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokring.checkpoint import Checkpoint
from tokring.models.errors import ModelError
from tokring.models.plan import DecoderPlan, LayerPlan
from tokring.models.registry import plan_of
from tokring.models.rope import RopeTables, build_rope_tables
from tokring_kernels import Decoder, DecoderLayer, PackedLinear
from tokring_kernels.linear import WeightKind

Float32 = NDArray[np.float32]
Progress = Callable[[int, int], None]  # (bytes read, bytes in all)
PACKED_KINDS: dict[str, WeightKind] = {"q4_0": "Q4_0", "q4_1": "Q4_1", "q8_0": "Q8_0"}


def why_not_native(checkpoint: Checkpoint, dtype: str) -> str | None:
    """None if the native decoder can take the model in this dtype, else the reason in a few words."""
    plan, config = plan_of(checkpoint.config), checkpoint.config
    rope = [build_rope_tables(layer.rope, config, 1) for layer in plan.layers[:1]]
    unmet = {
        f"its activation is {plan.activation}": plan.activation != "silu",
        "its scores or logits are soft-capped": plan.attention_soft_cap or plan.final_soft_cap,
        "its embeddings are scaled": plan.embedding_scale != 1.0,
        "it has norms behind attention or MLP": plan.attention_output_norm or plan.mlp_output_norm,
        "it rotates a part of each head only": rope[0].cos.shape[1] * 2 != config.head_dim,
        "its head_dim is no multiple of 8": config.head_dim % 8,
        "a width is no multiple of 32": (config.hidden_size | config.intermediate_size | query_width(checkpoint)) % 32,
        "its MLP or attention output has biases": config.mlp_bias
        or "model.layers.0.self_attn.o_proj.bias" in checkpoint.tensor_names(),
        "its weights are not quantized, and computed in float32": dtype != "bfloat16" and not is_quantized(checkpoint),
        "float32 was asked for": dtype == "float32",
    }
    return next((reason for reason, applies in unmet.items() if applies), None)


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether the layers' matrices are stored in blocks that the kernels read as they are."""
    probe = checkpoint.quantized("model.layers.0.mlp.down_proj.weight")
    return probe is not None and probe.kind in PACKED_KINDS


def query_width(checkpoint: Checkpoint) -> int:
    return checkpoint.config.num_heads * checkpoint.config.head_dim


def load_native_decoder(checkpoint: Checkpoint, max_model_len: int, progress: Progress) -> Decoder:
    """Reads and packs every weight. Raises ModelError, CheckpointError."""
    return NativeLoader(checkpoint, max_model_len, progress).load()


class NativeLoader:
    """Names, shapes and order of the weights (Hugging Face's)."""

    def __init__(self, checkpoint: Checkpoint, max_model_len: int, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._plan: DecoderPlan = plan_of(checkpoint.config)
        self._names = set(checkpoint.tensor_names())
        self._max_model_len = max_model_len
        self._progress = progress
        self._num_read = 0
        self._rope_tables: list[tuple[Any, RopeTables]] = []

    def load(self) -> Decoder:
        config = self._config
        embedding = self._array("model.embed_tokens.weight")
        head_name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        decoder = Decoder(
            [self._layer(f"model.layers.{index}.", layer) for index, layer in enumerate(self._plan.layers)],
            embedding=embedding if embedding.dtype == np.uint16 else to_float32(embedding),
            final_norm=self._norm("model.norm"),
            head=self._linear([head_name], config.vocab_size, config.hidden_size),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_epsilon=config.rms_norm_eps,
            attention_scale=self._plan.attention_scale,
        )
        self._progress(self._checkpoint.total_bytes, self._checkpoint.total_bytes)
        return decoder

    def _layer(self, prefix: str, layer: LayerPlan) -> DecoderLayer:
        config, plan = self._config, self._plan
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        query, key = query_width(self._checkpoint), config.num_kv_heads * config.head_dim
        fused = [attention + "qkv_proj.weight"] if plan.has_fused_projections else None
        gate_up = [mlp + "gate_up_proj.weight"] if plan.has_fused_projections else None
        rope = self._rope(layer)
        head_norms = plan.has_head_norms
        return DecoderLayer(
            attention_norm=self._norm(prefix + "input_layernorm"),
            query=self._linear(fused or [attention + "q_proj.weight"], query, config.hidden_size),
            key=self._linear(fused or [attention + "k_proj.weight"], key, config.hidden_size, query if fused else 0),
            value=self._linear(
                fused or [attention + "v_proj.weight"], key, config.hidden_size, query + key if fused else 0
            ),
            output=self._linear([attention + "o_proj.weight"], config.hidden_size, query),
            mlp_norm=self._norm(prefix + plan.mlp_norm),
            gate=self._linear(gate_up or [mlp + "gate_proj.weight"], config.intermediate_size, config.hidden_size),
            up=self._linear(
                gate_up or [mlp + "up_proj.weight"],
                config.intermediate_size,
                config.hidden_size,
                config.intermediate_size if gate_up else 0,
            ),
            down=self._linear([mlp + "down_proj.weight"], config.hidden_size, config.intermediate_size),
            cosine=rope.cos,
            sine=rope.sin,
            qkv_bias=self._bias([attention + name for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias")]),
            query_norm=self._norm(attention + "q_norm") if head_norms else None,
            key_norm=self._norm(attention + "k_norm") if head_norms else None,
            sliding_window=layer.sliding_window,
        )

    def _linear(self, names: list[str], outputs: int, inputs: int, first_row: int = 0) -> PackedLinear:
        """Rows [first_row, first_row + outputs) of a matrix, in the form the kernels read fastest without loss."""
        (name,) = names
        rows = slice(first_row, first_row + outputs)
        quantized = self._checkpoint.quantized(name) if name in self._names else None
        if quantized is not None and quantized.kind in PACKED_KINDS:
            self._check(name, quantized.shape, first_row + outputs, inputs)
            return PackedLinear(PACKED_KINDS[quantized.kind], np.ascontiguousarray(quantized.data[rows]), inputs)
        array = self._array(name)
        self._check(name, array.shape, first_row + outputs, inputs)
        if array.dtype == np.uint16:
            return PackedLinear("BF16", np.ascontiguousarray(array[rows]), inputs)
        if quantized is not None:  # another block format: its values fit 8 bits a block well, bfloat16 less so
            return PackedLinear("Q8_0", to_q8_0(np.asarray(array[rows], np.float32)), inputs)
        return PackedLinear("BF16", to_bfloat16(array[rows]), inputs)

    def _check(self, name: str, shape: Sequence[int], least_rows: int, inputs: int) -> None:
        if len(shape) != 2 or shape[0] < least_rows or shape[1] != inputs:
            raise ModelError(f"tensor {name} has shape {list(shape)}, config needs [{least_rows}, {inputs}]")

    def _array(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise ModelError(f"the checkpoint has no tensor {name}; it does not fit its own config")
        array: NDArray[Any] = self._checkpoint.tensor(name)
        self._num_read += array.nbytes
        self._progress(min(self._num_read, self._checkpoint.total_bytes), self._checkpoint.total_bytes)
        return array

    def _vector(self, name: str) -> Float32:
        array = self._array(name)
        return to_float32(array)

    def _norm(self, name: str) -> Float32:
        return self._vector(name + ".weight") + np.float32(self._plan.norm_offset)

    def _bias(self, names: list[str]) -> Float32 | None:
        if not any(name in self._names for name in names):
            return None
        return np.concatenate([self._vector(name) for name in names])

    def _rope(self, layer: LayerPlan) -> RopeTables:
        """Layers with equal parameters share one pair of tables."""
        for parameters, tables in self._rope_tables:
            if parameters == layer.rope:
                return tables
        tables = build_rope_tables(layer.rope, self._config, self._max_model_len)
        self._rope_tables.append((layer.rope, tables))
        return tables


def to_float32(array: NDArray[Any]) -> Float32:
    """float32, float16 or bfloat16 bits to float32, a copy."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def to_bfloat16(array: NDArray[Any]) -> NDArray[np.uint16]:
    """bfloat16's bits, rounded to nearest even; finite weights only."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_q8_0(weights: Float32) -> NDArray[np.uint8]:
    """GGUF's Q8_0 rows of float32[n, k]: per 32 values an fp16 scale and 32 signed bytes."""
    blocks = weights.reshape(len(weights), -1, 32)
    scale = (np.abs(blocks).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    divisor = np.where(scale == 0, np.float32(1), scale.astype(np.float32))
    values = np.clip(np.rint(blocks / divisor), -127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), values.view(np.uint8)], axis=-1).reshape(len(weights), -1)
