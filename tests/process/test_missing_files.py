"""Files that are gone, or broken, when a process dies: whoever does not need them goes on without."""

import os
from pathlib import Path

import pytest

from tests.process.test_frontend_restart import answer, kill, post, stopped, text_of
from tests.support.serving import START_DEADLINE_S, mock_server, wait_until
from tokring.config import Config, ConfigError
from tokring.options import parse_serve_arguments


def test_files_are_looked_for_at_the_start_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    with pytest.raises(ConfigError, match="--api-key-file .*keys: no such file"):
        parse_serve_arguments(["--api-key-file", str(keys)], {})
    os.mkfifo(keys)
    with pytest.raises(ConfigError, match="--api-key-file .*keys: not a regular file"):
        parse_serve_arguments(["--api-key-file", str(keys)], {})
    keys.unlink()
    keys.write_text("key")
    config = parse_serve_arguments(["--api-key-file", str(keys)], {})
    keys.unlink()
    assert Config.from_json(config.to_json()) == config


def test_an_engine_is_followed_by_another_while_a_file_of_the_front_ends_is_gone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key")
    with mock_server("--api-key-file", str(keys), "--engine-restarts", "1") as server:
        keys.unlink()
        kill(server, "engine 0")
        wait_until(lambda: server.health() == 200, "the next engine serves", START_DEADLINE_S)


def test_a_front_end_that_refuses_to_start_takes_no_other_down_and_serves_once_it_can(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    with mock_server("--mock-step-ms", "5", "--api-server-count", "2", "--chat-template", str(template)) as server:
        expected = answer(server, 600)["choices"][0]["text"]
        with stopped(server.children()["frontend 1"]):
            kept = post(server.url, stream=True, max_tokens=600)
        template.write_text("{% if %}")
        kill(server, "frontend 1")
        wait_until(lambda: server.log.count("another one starts in") >= 2, "it has refused to start twice")
        assert "The chat template does not compile" in server.log
        template.write_text("{{ messages[0].content }}")
        assert text_of(kept.read()) == expected
        wait_until(lambda: "frontend 1 is ready after" in server.log, "it serves again", START_DEADLINE_S)
        assert server.health() == 200


def test_a_front_end_whose_recording_cannot_be_written_serves_without(tmp_path: Path) -> None:
    file = tmp_path / "traffic.rec"
    with mock_server("--record", str(file)) as server:
        assert answer(server)["usage"]["completion_tokens"] == 4
        file.unlink()
        file.mkdir()
        server.children()["frontend 0"].kill()
        assert answer(server)["usage"]["completion_tokens"] == 4
        assert "traffic.rec: Is a directory; nothing is recorded" in server.log
