"""GGUF weights and configuration, against the gguf library."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.support.tiny_gguf import close, write_metadata, write_tiny_gguf, write_tiny_vocabulary
from tests.support.tiny_hf import LLAMA, random_weights

from tokring.checkpoint import CheckpointError, open_checkpoint
from tokring.checkpoint.gguf_file import COMMON_TYPES
from tokring.checkpoint.quantized_tensor import BLOCK_SIZES, dequantize_blocks


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_come_back_in_hugging_face_order(tmp_path: Path, kind: str, architecture: str) -> None:
    path = tmp_path / "tiny.gguf"
    expected = write_tiny_gguf(path, kind=kind, model_type=architecture, tie_word_embeddings=architecture == "llama")
    checkpoint = open_checkpoint(str(path))
    assert sorted(checkpoint.tensor_names()) == sorted(expected)
    for name, array in expected.items():
        found = checkpoint.tensor(name)
        if found.dtype == np.uint16:
            found = (found.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(found.astype(np.float32), array, err_msg=name)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_raw_blocks_are_in_the_order_of_the_dequantized_rows(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    expected = write_tiny_gguf(path, kind=kind)
    checkpoint = open_checkpoint(str(path))
    for name, array in expected.items():
        quantized = checkpoint.quantized(name)
        if array.ndim == 1:
            assert quantized is None
            continue
        assert quantized is not None
        assert (quantized.kind, quantized.shape) == (kind.lower(), array.shape)
        assert quantized.data.flags.c_contiguous and quantized.data.dtype == np.uint8
        np.testing.assert_array_equal(quantized.dequantize(), array, err_msg=name)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_dequantized_with_the_librarys_bits(kind: str) -> None:
    """More blocks than are done at a time, each of random bytes: scales that are NaN or infinite are among them."""
    _, block_bytes = BLOCK_SIZES[kind.lower()]
    blocks = np.random.default_rng(1).integers(0, 256, (60, 80 * block_bytes), np.uint8)
    found = dequantize_blocks(kind, blocks)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert found.shape == (60, 80 * 32) and np.isnan(found).any()
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_the_types_written_down_are_the_librarys() -> None:
    for number, (name, *sizes) in COMMON_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, tuple(sizes)) == (name, gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("kind", ["F16", "Q5_1"])
def test_other_kinds_have_no_raw_blocks(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind=kind)
    assert open_checkpoint(str(path)).quantized("model.layers.0.mlp.up_proj.weight") is None


def test_types_of_plain_tensors_are_kept(tmp_path: Path) -> None:
    for kind, dtype in (("F32", np.float32), ("F16", np.float16), ("BF16", np.uint16)):
        write_tiny_gguf(tmp_path / f"{kind}.gguf", kind=kind)
        tensor = open_checkpoint(str(tmp_path / f"{kind}.gguf")).tensor("model.layers.0.self_attn.q_proj.weight")
        assert tensor.dtype == dtype


def test_config_comes_from_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    checkpoint = open_checkpoint(str(path))
    config = checkpoint.config
    assert (checkpoint.name, checkpoint.format) == ("tiny", "gguf")
    assert (config.architecture, config.hidden_size, config.intermediate_size) == ("llama", 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.vocab_size, config.max_position_embeddings) == (400, 512)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 10000.0, None)
    assert config.tie_word_embeddings and not config.attention_bias


def test_output_weight_is_an_untied_head(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, tie_word_embeddings=False)
    checkpoint = open_checkpoint(str(path))
    assert not checkpoint.config.tie_word_embeddings
    assert checkpoint.tensor("lm_head.weight").shape == (400, 64)


def test_biases_of_qwen2_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, model_type="qwen2")
    assert open_checkpoint(str(path)).config.attention_bias


def write_with(path: Path, extra: dict[str, Any], factors: np.ndarray | None = None, **config: Any) -> Path:
    """A GGUF of a tiny Llama with more metadata (floats, strings) and rope_freqs."""
    settings = {**LLAMA, **config}
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, settings)
    write_tiny_vocabulary(writer)
    for key, value in extra.items():
        match value:
            case str():
                writer.add_string(key, value)
            case float():
                writer.add_float32(key, value)
            case _:
                writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", random_weights(settings)["model.embed_tokens.weight"])
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    close(writer)
    return path


def test_linear_and_yarn_scaling_are_read(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_with(tmp_path / "linear.gguf", linear)
    assert open_checkpoint(str(path)).config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    yarn = {**linear, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 4096}
    path = write_with(tmp_path / "yarn.gguf", yarn)
    assert open_checkpoint(str(path)).config.rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }


def test_unknown_scaling_is_refused(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}
    with pytest.raises(CheckpointError, match="longrope"):
        open_checkpoint(str(write_with(tmp_path / "x.gguf", extra)))


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """transformers' rope_type "llama3" as divisors."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognized_in_rope_freqs(tmp_path: Path, factor: float) -> None:
    factors = llama3_factors(64, 500000.0, factor)
    path = write_with(tmp_path / "x.gguf", {}, factors, head_dim=64, rope_theta=500000.0)
    scaling = open_checkpoint(str(path)).config.rope_scaling
    assert scaling is not None and scaling["rope_type"] == "llama3"
    assert scaling["factor"] == pytest.approx(factor, rel=1e-5)


def test_other_rope_freqs_are_handed_on_as_they_are(tmp_path: Path) -> None:
    factors = np.float32([1, 1, 2, 3, 5, 8, 13, 21])
    path = write_with(tmp_path / "x.gguf", {}, factors)
    assert open_checkpoint(str(path)).config.rope_scaling == {
        "rope_type": "frequency_factors",
        "frequency_factors": factors.tolist(),
    }


def test_a_directory_with_one_gguf_means_that_file(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    assert open_checkpoint(str(tmp_path)).path == tmp_path / "tiny.gguf"
    write_tiny_gguf(tmp_path / "second.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files; name one"):
        open_checkpoint(str(tmp_path))
