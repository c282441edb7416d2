"""Seen by strace: between front end and engine only doorbells are exchanged, never a socket message a step."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.acceptance.test_many_requests import complete
from tests.support.serving import ServerProcess, mock_server, wait_until

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None and not os.environ.get("CI"), reason="needs the Debian package strace"
)
NUM_TOKENS = 200
NETWORK_CALLS = "sendto|sendmsg|sendmmsg|recvfrom|recvmsg|recvmmsg"


def traced(server: ServerProcess, log: Path) -> "subprocess.Popen[bytes]":
    """strace attached to both children."""
    pids = [argument for child in server.children().values() for argument in ("-p", str(child.pid))]
    command = ["strace", "-f", "-yy", "-e", "trace=network,read,write", "-o", str(log), *pids]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert tracer.stderr is not None
    attached = 0
    deadline = time.monotonic() + 30
    while attached < len(pids) // 2 and time.monotonic() < deadline:
        attached += b"attached" in tracer.stderr.readline()
    return tracer


def test_a_stream_costs_doorbells_and_client_bytes_only(tmp_path: Path) -> None:
    log = tmp_path / "trace"
    with mock_server("--mock-step-ms", "10") as server:
        tracer = traced(server, log)
        try:
            complete(server.url, [300, 301], max_tokens=NUM_TOKENS, stream=True)
        finally:
            tracer.terminate()
            assert tracer.stderr is not None
            tracer.stderr.read()
            tracer.wait(30)
            tracer.stderr.close()
        wait_until(log.exists, "the trace is written")
    calls = log.read_text(errors="replace").splitlines()
    control = [call for call in calls if re.search(rf"\b({NETWORK_CALLS}|read|write)\(\d+<UNIX-", call)]
    client = [call for call in calls if re.search(rf"\b({NETWORK_CALLS}|write)\(\d+<TCP", call)]
    doorbells = [call for call in calls if re.search(r"\bwrite\(\d+<pipe:", call)]
    assert len(client) >= NUM_TOKENS // 2  # the tokens went to the client nearly one by one, slowed by strace
    # Messages on Unix sockets are rare control calls; a message a step would be hundreds.
    assert len(control) <= 20, control[:20]
    assert NUM_TOKENS // 4 <= len(doorbells) <= 3 * NUM_TOKENS
