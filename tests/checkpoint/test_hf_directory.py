"""Hugging Face directories: weights, configuration, tokenizer and templates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tiny_hf import LLAMA, as_dtype, random_weights, write_json, write_tiny_hf
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer

from tokring.checkpoint import open_checkpoint


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_weights_come_back_bit_for_bit(tmp_path: Path, dtype: str, num_shards: int) -> None:
    checkpoint = open_checkpoint(str(write_tiny_hf(tmp_path, dtype=dtype, num_shards=num_shards)))
    expected = {name: as_dtype(array, dtype) for name, array in random_weights(LLAMA).items()}
    assert sorted(checkpoint.tensor_names()) == sorted(expected)
    for name, array in expected.items():
        found = checkpoint.tensor(name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        assert checkpoint.quantized(name) is None
    assert checkpoint.total_bytes == sum(array.nbytes for array in expected.values())


def test_safetensors_library_reads_what_the_writer_wrote(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    write_tiny_hf(tmp_path, dtype="float32")
    for name, array in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(array, random_weights(LLAMA)[name])


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    torch = pytest.importorskip("torch")
    from tokring.checkpoint.safetensors_writer import to_bfloat16

    values = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.float32([0, -0.0, 1, 1.00390625, 1.01171875])])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16(values), expected)


def test_config_says_what_config_json_says(tmp_path: Path) -> None:
    config = open_checkpoint(str(write_tiny_hf(tmp_path))).config
    assert (config.architecture, config.num_layers, config.head_dim, config.vocab_size) == ("llama", 2, 16, 400)
    assert (config.num_heads, config.num_kv_heads, config.rope_theta, config.rope_scaling) == (4, 2, 10000.0, None)
    assert config.tie_word_embeddings and not config.attention_bias
    assert config.raw["model_type"] == "llama"


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("settings", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}, 5e5, LLAMA3_ROPE),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_parameters": {"rope_theta": 1e6, **LLAMA3_ROPE}}, 1e6, LLAMA3_ROPE),
    ],
)
def test_rope_is_read_in_the_old_and_the_new_spelling(
    tmp_path: Path, settings: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    write_tiny_hf(tmp_path)
    base = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    write_json(tmp_path / "config.json", {**base, **settings})
    config = open_checkpoint(str(tmp_path)).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("class_name", ["LlamaConfig", "Qwen2Config", "Qwen3Config", "MistralConfig", "Gemma2Config"])
def test_defaults_are_those_of_transformers(tmp_path: Path, class_name: str) -> None:
    import transformers

    reference = getattr(transformers, class_name)()
    write_tiny_hf(tmp_path)
    kept = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    write_json(tmp_path / "config.json", {name: reference.to_dict()[name] for name in kept})
    config = open_checkpoint(str(tmp_path)).config
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope_theta == reference.rope_parameters["rope_theta"]
    assert config.head_dim == (getattr(reference, "head_dim", None) or reference.hidden_size // config.num_heads)


def test_head_is_tied_if_the_weights_have_none(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, tie_word_embeddings=True)
    write_json(tmp_path / "config.json", {**LLAMA, "tie_word_embeddings": False})
    assert open_checkpoint(str(tmp_path)).config.tie_word_embeddings


def test_untied_head_is_a_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny_hf(tmp_path, tie_word_embeddings=False)))
    assert not checkpoint.config.tie_word_embeddings
    assert checkpoint.tensor("lm_head.weight").shape == (400, 64)


def test_unused_sliding_window_of_qwen2_is_left_out(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, model_type="qwen2", sliding_window=32, use_sliding_window=False)
    config = open_checkpoint(str(tmp_path)).config
    assert config.sliding_window is None and config.layer_types is None and config.attention_bias


def test_used_sliding_window_of_qwen2_starts_at_its_layer(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, model_type="qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=1)
    config = open_checkpoint(str(tmp_path)).config
    assert config.sliding_window == 32
    assert config.layer_types == ("full_attention", "sliding_attention")


def test_tokenizer_and_end_tokens_are_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny_hf(tmp_path)))
    assert checkpoint.load_tokenizer().encode("The capital").ids == tiny_tokenizer().encode("The capital").ids
    assert checkpoint.eos_ids == (2,)
    assert checkpoint.bos_id is None and not checkpoint.add_bos
    assert checkpoint.special_tokens == {"eos_token": "<|im_end|>"}
    assert checkpoint.generation_defaults == {"temperature": 0.7}


def test_eos_ids_are_the_union_of_generation_config_and_the_tokenizers(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [7, 0]})
    assert open_checkpoint(str(tmp_path)).eos_ids == (0, 2, 7)


def test_truncation_and_padding_left_in_tokenizer_json_are_switched_off(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = open_checkpoint(str(tmp_path)).load_tokenizer().encode("one two three four five six").ids
    assert ids == tiny_tokenizer().encode("one two three four five six").ids


@pytest.mark.parametrize("add_bos", [True, False])
def test_add_bos_token_of_tokenizer_config_is_obeyed(tmp_path: Path, add_bos: bool) -> None:
    write_tiny_hf(tmp_path)
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "add_bos_token": add_bos}
    write_json(tmp_path / "tokenizer_config.json", settings)
    checkpoint = open_checkpoint(str(tmp_path))
    plain = tiny_tokenizer().encode("here").ids
    assert checkpoint.bos_id == 1 and checkpoint.add_bos is add_bos
    assert checkpoint.load_tokenizer().encode("here").ids == ([1] if add_bos else []) + plain
    assert checkpoint.load_tokenizer().encode("here", add_special_tokens=False).ids == plain


def test_named_templates_are_all_kept(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    templates = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": templates})
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.chat_template == "A"
    assert checkpoint.chat_templates == {"default": "A", "tool_use": "B"}


def test_chat_template_file_goes_before_tokenizer_config(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    assert open_checkpoint(str(tmp_path)).chat_template == CHAT_TEMPLATE
    (tmp_path / "chat_template.jinja").write_text("{{ 1 }}")
    assert open_checkpoint(str(tmp_path)).chat_template == "{{ 1 }}"


def test_the_users_template_goes_before_all(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path / "model")
    path = tmp_path / "mine.jinja"
    path.write_text("{{ 2 }}")
    assert open_checkpoint(str(tmp_path / "model"), chat_template=str(path)).chat_template == "{{ 2 }}"
    assert open_checkpoint(str(tmp_path / "model"), chat_template="{{ 3 }}").chat_template == "{{ 3 }}"


def test_another_tokenizer_can_be_named(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    other = write_tiny_hf(tmp_path / "other")
    write_json(other / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    write_json(other / "generation_config.json", {})
    for name in (other, other / "tokenizer.json"):
        checkpoint = open_checkpoint(str(tmp_path / "model"), tokenizer=str(name))
        assert checkpoint.eos_ids == (0, 2)
        assert checkpoint.load_tokenizer().get_vocab_size() == 400


def test_weights_can_be_opened_without_a_tokenizer(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 400
    assert open_checkpoint(str(tmp_path)).tensor("model.norm.weight").shape == (64,)
