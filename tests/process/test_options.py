"""Every option can be given as flag, variable and key; bad values are refused in a line that names the flag."""

import argparse
from pathlib import Path

import pytest

from tokring.config import Config, ConfigError
from tokring.options import add_arguments, all_fields, parse_serve_arguments


def test_defaults_build_a_valid_configuration_that_survives_json() -> None:
    config = parse_serve_arguments([], {})
    assert Config.from_json(config.to_json()) == config
    assert (config.engine.max_num_seqs, config.server.max_queued, config.server.port) == (256, 1024, 8000)


def test_every_option_survives_json_when_given() -> None:
    argv = ["m.gguf", "--served-model-name", "a", "b", "--api-key", "k", "--max-model-len", "2K", "--uds", "s"]
    config = parse_serve_arguments(argv, {})
    assert config.model.model == "m.gguf"
    assert config.model.served_model_name == ("a", "b")
    assert config.model.max_model_len == 2048
    assert Config.from_json(config.to_json()) == config


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "tokring.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nmax_queued: 3\nserved-model-name: [x, y]\n")
    environment = {"TOKRING_PORT": "11", "TOKRING_MAX_NUM_SEQS": "12", "TOKRING_CONFIG": str(file)}
    config = parse_serve_arguments(["--port", "21"], environment)
    assert config.server.port == 21
    assert config.engine.max_num_seqs == 12
    assert config.server.max_queued == 3
    assert config.model.served_model_name == ("x", "y")


def test_sizes_take_suffixes() -> None:
    def kv_bytes(text: str) -> int | None:
        return parse_serve_arguments(["--kv-cache-memory-bytes", text], {}).engine.kv_cache_memory_bytes

    assert [kv_bytes(text) for text in ("7", "2k", "2K", "1.5G")] == [7, 2000, 2048, 3 << 29]


def test_switches_can_be_turned_off_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "tokring.yaml"
    file.write_text("enable-prefix-caching: false\n")
    for argv, environment in (
        (["--no-enable-prefix-caching"], {}),
        ([], {"TOKRING_ENABLE_PREFIX_CACHING": "0"}),
        (["--config", str(file)], {}),
    ):
        assert not parse_serve_arguments(argv, environment).engine.enable_prefix_caching


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--port", "65536"], "--port"),
        (["--port", "http"], "--port"),
        (["--dtype", "int3"], "--dtype"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-seqs", "10M"], "--max-num-seqs"),
        (["--max-queued", "10M"], "--max-queued"),
        (["--api-server-count", "1000"], "--api-server-count"),
        (["--mock-step-ms", "nan"], "--mock-step-ms"),
        (["--shutdown-timeout", "inf"], "--shutdown-timeout"),
        (["--kv-cache-memory-bytes", "1.5"], "--kv-cache-memory-bytes"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["--block-size", "32"], "--block-size"),
        (["--uds", "x" * 108], "--uds"),
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile"),
        (["--root-path", "api"], "--root-path"),
        (["--config", "/nonexistent/tokring.yaml"], "--config"),
        (["one", "--model", "two"], "--model"),
    ],
)
def test_a_bad_value_is_refused_in_one_line_that_names_the_flag(argv: list[str], flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_serve_arguments(argv, {})
    assert flag in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_value_is_said_to_come_from_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^TOKRING_PORT=http: "):
        parse_serve_arguments([], {"TOKRING_PORT": "http"})
    file = tmp_path / "tokring.yaml"
    file.write_text("port: http")
    with pytest.raises(ConfigError, match="^port in the configuration file: http: "):
        parse_serve_arguments(["--config", str(file)], {})


@pytest.mark.parametrize("text", ["[1, 2]", "unheard-of: 1", "port: [1]", "max-num-seqs: true", "a: b: c", "port: 1.5"])
def test_a_bad_configuration_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokring.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="tokring.yaml|configuration file"):
        parse_serve_arguments(["--config", str(file)], {})


def test_no_option_name_stands_in_two_sections() -> None:
    names = [item.name for item, _ in all_fields()]
    assert len(names) == len(set(names))


VLLMS_FLAGS = """--host --port --uds --model --served-model-name --max-model-len --max-num-seqs --max-num-batched-tokens
--block-size --dtype --seed --api-key --root-path --shutdown-timeout --disable-access-log-for-endpoints --ssl-keyfile
--ssl-certfile --ssl-ca-certs --enable-prefix-caching --kv-cache-memory-bytes --gpu-memory-utilization
--tensor-parallel-size --api-server-count --chat-template --generation-config --tokenizer"""


def test_flags_have_vllms_spelling() -> None:
    flags = {"--" + item.name.replace("_", "-") for item, _ in all_fields()}
    assert set(VLLMS_FLAGS.split()) <= flags


def test_connections_are_kept_for_two_minutes() -> None:
    assert parse_serve_arguments([], {}).server.timeout_keep_alive == 120


def test_help_has_a_text_for_every_option() -> None:
    parser = argparse.ArgumentParser(prog="tokring serve")
    add_arguments(parser)
    text = parser.format_help()
    for item, _ in all_fields():
        assert "--" + item.name.replace("_", "-") in text
        assert item.metadata["help"].split()[0] in text
