"""Front ends are replaced while clients go on: nothing is refused, nothing fails, the cache stays."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse, RemoteDisconnected
from pathlib import Path
from socket import create_connection
from urllib.parse import urlsplit

import pytest

from tests.process.test_engine_restart import metric, num_running
from tests.process.test_frontend_restart import answer, post, text_of
from tests.support.serving import START_DEADLINE_S, ServerProcess, mock_server, wait_until

NUM_RELOADS = int(os.environ.get("TOKRING_TEST_RELOADS", "2"))
LEAST_IDLE_GRACE_S = 4.0  # so long an idle connection stays at least (it is 5 s, and a request may be under way)


def reload(server: ServerProcess) -> int:
    return subprocess.run([sys.executable, "-m", "tokring", "reload", "--pid", str(server.pid)], timeout=100).returncode


class KeptConnection:
    """As pools of clients do: one connection, until the server says that it closes it, or has closed it idle."""

    def __init__(self, url: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=100)
        self._asked = 0.0  # time.monotonic(), on this connection; 0: not yet

    def get(self, path: str) -> HTTPResponse:
        last_asked, self._asked = self._asked, time.monotonic()
        try:
            self._connection.request("GET", path)
            response = self._connection.getresponse()
        except (ConnectionError, RemoteDisconnected):
            if not last_asked or self._asked - last_asked < LEAST_IDLE_GRACE_S:
                raise
            self.close()
            return self.get(path)
        response.read()
        if response.getheader("Connection", "").lower() == "close":
            self.close()
        return response

    def close(self) -> None:
        """Of the connection: the next request opens another one."""
        self._connection.close()
        self._asked = 0.0


def request_without_end(url: str, is_over: threading.Event) -> int:
    """How many requests were answered right: on new connections, and on one that is kept as long as it is let."""
    kept = KeptConnection(url)
    count = 0
    while not is_over.is_set():
        with post(url, stream=True, max_tokens=20) as response:
            text_of(response.read())
        assert kept.get("/v1/models").status == 200
        count += 2
    kept.close()
    return count


@pytest.mark.timeout(120 + 120 * NUM_RELOADS)
def test_reloads_under_load_fail_no_request_and_keep_the_cache() -> None:
    with mock_server("--mock-step-ms", "5", "--api-server-count", "2") as server, ThreadPoolExecutor(4) as pool:
        expected = answer(server, 600)["choices"][0]["text"]
        engine = server.children()["engine 0"]
        is_over = threading.Event()
        clients = [pool.submit(request_without_end, server.url, is_over) for _ in range(4)]
        try:
            with post(server.url, stream=True, max_tokens=600) as stream:
                for number in range(NUM_RELOADS):
                    assert reload(server) == 0
                    wait_until(lambda: len(server.children()) == 3, "the old front ends have ended", START_DEADLINE_S)
                    if number == 0:
                        assert text_of(stream.read()) == expected
        finally:
            is_over.set()
        assert all(client.result(START_DEADLINE_S) > 0 for client in clients)
        assert metric(server, "reloads") == NUM_RELOADS
        assert server.children()["engine 0"] == engine
        assert answer(server)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        wait_until(lambda: num_running(server) == 0, "nothing is left running")
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert server.pages() == []


@pytest.mark.timeout(360)
def test_a_reload_whose_front_ends_cannot_start_leaves_the_old_ones(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    with mock_server("--chat-template", str(template)) as server:
        frontend = server.children()["frontend 0"]
        template.write_text("{% if")
        assert reload(server) == 1
        assert "The chat template does not compile" in server.log
        assert answer(server)["usage"]["completion_tokens"] == 4
        template.write_text("{{ messages[0].content }}")
        with create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port), START_DEADLINE_S) as idle:
            idle.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle.recv(65536).startswith(b"HTTP/1.1 200")
            assert reload(server) == 0
            assert "frontend 1 is ready after" in server.log
            while idle.recv(65536):  # until the front end that was replaced closes it
                pass
        wait_until(lambda: not frontend.is_running(), "the old front end has ended", START_DEADLINE_S)
        # A front end of a reload that dies is followed by another, as ever.
        server.children()["frontend 1"].kill()
        assert answer(server)["usage"]["completion_tokens"] == 4
