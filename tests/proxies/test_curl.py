"""curl over a unix socket, as an operator would."""

import json
import subprocess
from pathlib import Path

from tests.proxies.programs import needs
from tests.support.serving import mock_server


def test_curl_streams_over_a_unix_socket(tmp_path: Path) -> None:
    curl, path = needs("curl"), tmp_path / "api.sock"
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True})
    with mock_server("--uds", str(path)):
        socket = [curl, "--silent", "--show-error", "--fail", "--max-time", "20", "--unix-socket", str(path)]
        health = subprocess.run([*socket, "http://localhost/health"], capture_output=True, check=True)
        assert json.loads(health.stdout) == {"status": "ok"}
        request = ["-N", "-H", "Content-Type: application/json", "-d", body, "http://localhost/v1/chat/completions"]
        answer = subprocess.run([*socket, *request], capture_output=True, check=True)
        lines = [line for line in answer.stdout.decode().split("\n") if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]" and len(lines) >= 3
