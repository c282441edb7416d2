"""SIGHUP with --api-key-file, and logs for machines, on a real server."""

import json
import signal
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.support.serving import mock_server, wait_until


def test_a_hangup_reads_the_keys_again_and_every_log_line_is_json(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    with mock_server("--api-key-file", str(keys), "--log-format", "json") as server:
        url = server.url
        assert _status(url, "old") == 200 and _status(url, "new") == 401
        keys.write_text("new\n")
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: _status(url, "new") == 200, "the new key opens")
        assert _status(url, "old") == 401
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
    entries = [json.loads(line) for line in server.lines]
    assert any(entry.get("path") == "/v1/models" and entry["status"] == 401 for entry in entries)
    assert {"supervisor", "frontend 0"} <= {entry["process"] for entry in entries}


def _status(url: str, key: str) -> int:
    try:
        with urlopen(Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}), timeout=10) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
