"""Files that can't be used: one clear line with path and reason, never anything but CheckpointError."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_hf import LLAMA, write_json, write_tiny_hf

from tokring.checkpoint import CheckpointError, open_checkpoint
from tokring.checkpoint.gguf_config import parse_metadata
from tokring.checkpoint.gguf_file import GgufFile
from tokring.checkpoint.gguf_tensors import GgufTensors
from tokring.checkpoint.gguf_vocabulary import GgufVocabulary


def use(path: Path) -> None:
    """Asks for everything a server and an engine ask for."""
    checkpoint = open_checkpoint(str(path))
    for name in checkpoint.tensor_names():
        checkpoint.tensor(name)
        checkpoint.quantized(name)
    checkpoint.load_tokenizer().encode("The capital of France is 42")
    _ = checkpoint.chat_template, checkpoint.special_tokens, checkpoint.bos_id, checkpoint.eos_ids, checkpoint.add_bos
    _ = checkpoint.generation_defaults


def error_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as info:
        use(path)
    message = str(info.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def cut(path: Path, num_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(num_bytes)


def test_missing_path_is_named(tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "nothing")


def test_device_is_no_model() -> None:
    assert "neither a file nor a directory" in error_of(Path(os.devnull))


def test_empty_directory_is_no_model(tmp_path: Path) -> None:
    assert "has no config.json and no GGUF" in error_of(tmp_path)


def test_empty_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    assert "is empty" in error_of(tmp_path / "x.gguf")


def test_other_file_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("hello, I am text")
    assert "is not a GGUF file" in error_of(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_named(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").chmod(0)
    assert "Permission denied" in error_of(tmp_path / "x.gguf")


Damage = Callable[[Path], None]


def remove(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def overwrite(name: str, text: str) -> Damage:
    return lambda directory: (directory / name).write_text(text) and None


def reconfigure(**entries: Any) -> Damage:
    return lambda directory: write_json(directory / "config.json", {**LLAMA, **entries})


def shorten(name: str, num_bytes: int) -> Damage:
    return lambda directory: cut(directory / name, num_bytes)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove("config.json"), "has no config.json"),
        (remove("model.safetensors"), "has neither model.safetensors nor"),
        (remove("tokenizer.json"), "has no tokenizer.json"),
        (overwrite("config.json", "{"), "not valid JSON"),
        (overwrite("config.json", "[1]"), "an object is needed"),
        (overwrite("tokenizer.json", "{}"), "no usable tokenizer"),
        (overwrite("tokenizer_config.json", '{"chat_template": 3}'), "chat_template"),
        (overwrite("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id"),
        (reconfigure(model_type=None), "has no model_type"),
        (reconfigure(hidden_size=None), "has no hidden_size"),
        (reconfigure(num_hidden_layers="2"), "num_hidden_layers"),
        (reconfigure(num_hidden_layers=10**12, model_type="gemma2"), "num_hidden_layers"),
        (reconfigure(num_attention_heads=0, head_dim=None), "zero"),
        (reconfigure(num_key_value_heads=3), "not a multiple"),
        (reconfigure(rms_norm_eps=float("nan")), "rms_norm_eps"),
        (reconfigure(rope_scaling="yes"), "can't be used"),
        (reconfigure(quantization_config={"quant_method": "gptq"}), "gptq"),
        (shorten("model.safetensors", 100_000), "is truncated"),
        (shorten("model.safetensors", 1000), "is truncated"),
        (shorten("model.safetensors", 4), "is truncated"),
        (shorten("model.safetensors", 0), "is empty"),
    ],
)
def test_damaged_directory_is_explained(tmp_path: Path, damage: Damage, reason: str) -> None:
    write_tiny_hf(tmp_path)
    damage(tmp_path)
    assert reason in error_of(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "safetensors are needed" in error_of(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: is missing" in error_of(tmp_path)


def test_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, num_shards=2)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "../x.safetensors"}})
    assert "strange file" in error_of(tmp_path)


def test_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["extra.weight"] = "model-00001-of-00002.safetensors"
    write_json(index, content)
    assert "'extra.weight'" in error_of(tmp_path)


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path / "hf")
    write_tiny_gguf(tmp_path / "x.gguf")
    for path in (tmp_path / "hf", tmp_path / "x.gguf"):
        with pytest.raises(CheckpointError, match="has no tensor 'nope'"):
            open_checkpoint(str(path)).tensor("nope")


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "truncated or damaged"),
        (16, struct.pack("<Q", 1 << 60), "truncated or damaged"),
        (24, struct.pack("<Q", 1 << 62), "truncated or damaged"),
    ],
)
def test_damaged_gguf_header_is_explained(tmp_path: Path, offset: int, data: bytes, reason: str) -> None:
    path = tmp_path / "x.gguf"
    write_tiny_gguf(path)
    patch(path, offset, data)
    assert reason in error_of(path)


@pytest.mark.parametrize("num_bytes", [3, 30, 3000, 30_000])
def test_truncated_gguf_is_explained(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "x.gguf"
    write_tiny_gguf(path)
    cut(path, num_bytes)
    assert "truncated" in error_of(path)


def test_gguf_without_its_last_byte_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_tiny_gguf(path, kind="F32")
    cut(path, path.stat().st_size - 32)  # the padding of the last tensor may be missing, its bytes may not
    assert "truncated" in error_of(path)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_tiny_gguf(path, model_type="rwkv7")
    assert "'rwkv7'; supported are llama, qwen2, qwen3" in error_of(path)


@pytest.fixture(scope="module")
def intact_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "x.gguf"
    write_tiny_gguf(path, kind="Q4_1")
    return path


FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
EDITS = st.lists(
    st.tuples(st.integers(0, 30_000), st.one_of(st.binary(min_size=1, max_size=9), st.just(b"\xff" * 8))),
    min_size=1,
    max_size=4,
)


@FUZZ
@given(edits=EDITS)
def test_a_gguf_with_flipped_bytes_works_or_is_refused(
    tmp_path: Path, intact_gguf: Path, edits: list[tuple[int, bytes]]
) -> None:
    damaged = bytearray(intact_gguf.read_bytes())
    for offset, data in edits:
        damaged[offset : offset + len(data)] = data
    path = tmp_path / "x.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(damaged)
    try:
        use(path)
    except CheckpointError as error:
        assert "\n" not in str(error)


ARRAYS = {
    "empty": np.zeros(0, np.int32),
    "scores": np.zeros(400, np.float32),
    "types": np.full(400, 3, np.int32),
    "flags": np.zeros(2, bool),
}
METADATA_VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.text(max_size=5), max_size=4),
    st.lists(st.lists(st.integers(), max_size=2), max_size=2),
    st.sampled_from(sorted(ARRAYS)).map(ARRAYS.__getitem__),
)


@FUZZ
@given(place=st.integers(0, 1000), value=METADATA_VALUES)
def test_any_metadata_value_works_or_is_refused(tmp_path: Path, intact_gguf: Path, place: int, value: Any) -> None:
    file = GgufFile(intact_gguf)
    keys = [*file.metadata, *OTHER_KEYS]
    file.metadata[keys[place % len(keys)]] = value
    try:
        tensors = GgufTensors(file, parse_metadata(file))
        for name in tensors.names:
            tensors.tensor(name)
        vocabulary = GgufVocabulary(file)
        vocabulary.load_tokenizer().encode("The capital of France is 42")
        _ = vocabulary.chat_templates, vocabulary.special_tokens, vocabulary.eos_ids, vocabulary.add_bos
    except CheckpointError as error:
        assert "\n" not in str(error)


OTHER_KEYS = [
    "general.alignment",
    "llama.attention.sliding_window",
    "llama.expert_count",
    "llama.rope.dimension_count",
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.scores",
]


@FUZZ
@given(edits=EDITS)
def test_a_safetensors_file_with_flipped_bytes_works_or_is_refused(
    tmp_path: Path, edits: list[tuple[int, bytes]]
) -> None:
    if not (tmp_path / "config.json").exists():
        write_tiny_hf(tmp_path)
    path = tmp_path / "model.safetensors"
    original = path.read_bytes()
    damaged = bytearray(original)
    for offset, data in edits:
        place = offset % 3000  # the header
        damaged[place : place + len(data)] = data
    path.unlink()
    path.write_bytes(damaged)
    try:
        use(tmp_path)
    except CheckpointError as error:
        assert "\n" not in str(error)
    path.unlink()
    path.write_bytes(original)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@FUZZ
@given(
    name=st.sampled_from([*LLAMA, "rope_scaling", "rope_parameters", "layer_types", "sliding_window"]),
    value=JSON_VALUES,
)
def test_any_value_in_config_json_works_or_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    if not (tmp_path / "config.json").exists():
        write_tiny_hf(tmp_path)
    write_json(tmp_path / "config.json", {**LLAMA, name: value})
    try:
        use(tmp_path)
    except CheckpointError as error:
        assert "\n" not in str(error)


@FUZZ
@given(
    name=st.sampled_from(["bos_token", "eos_token", "chat_template", "add_bos_token", "add_eos_token"]),
    value=JSON_VALUES,
)
def test_any_value_in_tokenizer_config_works_or_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    if not (tmp_path / "config.json").exists():
        write_tiny_hf(tmp_path)
    write_json(
        tmp_path / "tokenizer_config.json", {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", name: value}
    )
    try:
        use(tmp_path)
    except CheckpointError as error:
        assert "\n" not in str(error)
