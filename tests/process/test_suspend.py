"""p28: a machine that was suspended, and a wall clock that is set, are neither hangs nor time-outs."""

import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.process.test_engine_restart import ask, metric, num_running
from tests.process.test_frontend_restart import post
from tests.process.test_lost_channel import BODY
from tests.support.serving import START_DEADLINE_S, mock_server, wait_until

STOP_S = float(os.environ.get("TOKRING_TEST_SUSPEND_S", "5"))  # 120 in the long form; longer than the step's time-out
DAY_S = 24 * 3600
SOURCE = Path(__file__).parents[1] / "support" / "shifted_clock.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")


def test_a_tree_that_was_stopped_as_a_whole_goes_on_as_if_nothing_had_been() -> None:
    with mock_server("--mock-step-ms", "5", "--step-timeout", "3") as server, ThreadPoolExecutor(4) as pool:
        bodies = [{**BODY, "seed": index, "max_tokens": 400} for index in range(4)]
        expected = [ask(server.url, "completions", body) for body in bodies]
        answers = [pool.submit(ask, server.url, "completions", body, 100 + STOP_S) for body in bodies]
        wait_until(lambda: num_running(server) == 4, "all run")
        tree = [psutil.Process(server.pid), *server.children().values()]
        for process in tree:
            process.suspend()
        ends = time.monotonic() + STOP_S
        wait_until(lambda: time.monotonic() >= ends, "time has passed", STOP_S + 30)
        for process in tree:
            process.resume()
        assert [one.result(START_DEADLINE_S)[:2] for one in answers] == [one[:2] for one in expected]
        assert metric(server, "hung_processes") == metric(server, "engine_restarts") == 0
        assert list(server.children().values()) == tree[1:]
        assert server.health() == 200


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_a_wall_clock_that_is_set_changes_created_and_nothing_else(tmp_path: Path) -> None:
    library, shift = tmp_path / "shifted_clock.so", tmp_path / "shift"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library)], check=True)
    shift.write_text("0")
    environment = {"LD_PRELOAD": str(library), "TOKRING_TEST_CLOCK": str(shift)}
    with mock_server("--mock-step-ms", "5", "--step-timeout", "4", environment=environment) as server:
        for shift_s in (DAY_S, -DAY_S):
            with post(server.url, stream=True, max_tokens=300) as stream:
                assert stream.readline().startswith(b"data: ")
                shift.write_text(str(shift_s))
                assert stream.read().endswith(b"data: [DONE]\n\n")
            with post(server.url, max_tokens=4) as response:
                created = json.load(response)["created"]
            assert abs(created - (time.time() + shift_s)) < 120
        assert server.health() == 200
        assert metric(server, "hung_processes") == metric(server, "engine_restarts") == 0
