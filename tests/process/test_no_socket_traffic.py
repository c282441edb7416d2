"""strace's view of the token path: between front end and engine only doorbells, at most one a step, no socket."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.process.test_start_and_stop import ask
from tests.support.programs import require_program
from tests.support.serving import mock_server, wait_until

NUM_TOKENS = 150
CALL = re.compile(r"^(?P<pid>\d+) +(?P<name>\w+)\((?P<fd>\d+)<(?P<file>[^>]*)>.*= (?P<result>-?\d+)")


@contextmanager
def traced(pids: list[int], output: Path) -> Iterator[None]:
    """Every network call, read and write of the processes and all their threads goes to the file."""
    strace = require_program("strace")
    selection = ["-f", "-yy", "-e", "trace=network,read,write"]
    attach = [word for pid in pids for word in ("-p", str(pid))]
    with (output.with_suffix(".err")).open("w") as messages:
        process = subprocess.Popen([strace, *selection, "-o", str(output), *attach], stderr=messages)
    attached = output.with_suffix(".err")
    wait_until(lambda: all(f"Process {pid} attached" in attached.read_text() for pid in pids), "strace is attached")
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def test_no_socket_carries_tokens_between_front_end_and_engine(tmp_path: Path) -> None:
    output = tmp_path / "calls"
    with mock_server("--mock-step-ms", "2") as server:
        ask(server.url)
        children = server.children()
        frontend, engine = children["frontend 0"].pid, children["engine 0"].pid
        engine_pids = {str(engine), *(str(thread.id) for thread in children["engine 0"].threads())}
        with traced([frontend, engine], output):
            answer = ask(server.url, max_tokens=NUM_TOKENS)
        assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    calls = [found.groupdict() for line in output.read_text().splitlines() if (found := CALL.match(line))]
    by_engine = [call for call in calls if call["pid"] in engine_pids]
    unix = [call for call in calls if call["file"].startswith("UNIX") and int(call["result"]) > 0]
    doorbells = [call for call in by_engine if call["name"] == "write" and call["file"].startswith("pipe:")]
    assert unix == []
    assert not [call for call in by_engine if call["file"].startswith("TCP")]
    assert 0 < len(doorbells) <= NUM_TOKENS + 10
    assert all(int(call["result"]) == 1 for call in doorbells)
