"""Builds a Decoder from a checkpoint's weights."""

from typing import Any, Generic

from tokring.checkpoint import ModelConfig
from tokring.models.decoder import Attention, Decoder, DecoderLayer, GatedMlp, LinearT
from tokring.models.linear import Float32
from tokring.models.plan import DecoderPlan, LayerPlan
from tokring.models.registry import plan_of
from tokring.models.rope import RopeTables, build_rope_tables
from tokring.models.weights import Weights
from tokring.models.workspace import WorkspaceWidths


def load_decoder(config: ModelConfig, weights: Weights[LinearT], max_model_len: int) -> Decoder[LinearT]:
    """Reads and packs every weight. Raises ModelError, CheckpointError."""
    return DecoderLoader(config, plan_of(config), weights, max_model_len).load()


class DecoderLoader(Generic[LinearT]):
    """Names, shapes and order of the weights (Hugging Face's)."""

    def __init__(self, config: ModelConfig, plan: DecoderPlan, weights: Weights[LinearT], max_model_len: int) -> None:
        self._config = config
        self._plan = plan
        self._weights = weights
        self._max_model_len = max_model_len
        self._query_width = config.num_heads * config.head_dim
        self._key_width = config.num_kv_heads * config.head_dim
        self._rope_tables: list[tuple[Any, RopeTables]] = []

    def load(self) -> Decoder[LinearT]:
        config, plan = self._config, self._plan
        embedding = self._weights.embedding("model.embed_tokens.weight", config.hidden_size)
        layers = [self._layer(f"model.layers.{index}.", layer) for index, layer in enumerate(plan.layers)]
        final_norm = self._norm("model.norm")
        head_name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        head = self._weights.linear([head_name], len(embedding), config.hidden_size)
        self._weights.finish()
        return Decoder(
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            head=head,
            norm_eps=config.rms_norm_eps,
            embedding_scale=plan.embedding_scale,
            final_soft_cap=plan.final_soft_cap,
            widths=WorkspaceWidths(
                hidden=config.hidden_size,
                query=self._query_width,
                qkv=self._query_width + 2 * self._key_width,
                intermediate=config.intermediate_size,
                vocabulary=len(embedding),
            ),
        )

    def _layer(self, prefix: str, layer: LayerPlan) -> DecoderLayer[LinearT]:
        plan = self._plan
        return DecoderLayer(
            attention=self._attention(prefix + "self_attn.", layer),
            mlp=self._mlp(prefix + "mlp."),
            attention_norm=self._norm(prefix + "input_layernorm"),
            mlp_norm=self._norm(prefix + plan.mlp_norm),
            attention_output_norm=self._norm(prefix + plan.attention_output_norm)
            if plan.attention_output_norm
            else None,
            mlp_output_norm=self._norm(prefix + plan.mlp_output_norm) if plan.mlp_output_norm else None,
            norm_eps=self._config.rms_norm_eps,
        )

    def _attention(self, prefix: str, layer: LayerPlan) -> Attention[LinearT]:
        config, plan = self._config, self._plan
        names = ["qkv_proj"] if plan.has_fused_projections else ["q_proj", "k_proj", "v_proj"]
        rows = self._query_width + 2 * self._key_width
        has_head_norms = plan.has_head_norms
        return Attention(
            qkv=self._linear(prefix, names, rows, config.hidden_size),
            output=self._linear(prefix, ["o_proj"], config.hidden_size, self._query_width),
            query_norm=self._norm(prefix + "q_norm", config.head_dim) if has_head_norms else None,
            key_norm=self._norm(prefix + "k_norm", config.head_dim) if has_head_norms else None,
            rope=self._rope(layer),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=plan.attention_scale,
            sliding_window=layer.sliding_window,
            soft_cap=plan.attention_soft_cap,
            norm_eps=config.rms_norm_eps,
        )

    def _mlp(self, prefix: str) -> GatedMlp[LinearT]:
        config = self._config
        names = ["gate_up_proj"] if self._plan.has_fused_projections else ["gate_proj", "up_proj"]
        return GatedMlp(
            gate_up=self._linear(prefix, names, 2 * config.intermediate_size, config.hidden_size),
            down=self._linear(prefix, ["down_proj"], config.hidden_size, config.intermediate_size),
            activation=self._plan.activation,
        )

    def _linear(self, prefix: str, names: list[str], num_outputs: int, num_inputs: int) -> LinearT:
        return self._weights.linear([prefix + name for name in names], num_outputs, num_inputs)

    def _norm(self, name: str, length: int | None = None) -> Float32:
        weight = self._weights.vector(name + ".weight", length or self._config.hidden_size)
        weight += self._plan.norm_offset
        return weight

    def _rope(self, layer: LayerPlan) -> RopeTables:
        """Layers with equal parameters share one pair of tables."""
        for parameters, tables in self._rope_tables:
            if parameters == layer.rope:
                return tables
        tables = build_rope_tables(layer.rope, self._config, self._max_model_len)
        self._rope_tables.append((layer.rope, tables))
        return tables
