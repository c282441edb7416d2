"""Tests of whole servers may be tried three times; every failed try is named in pytest's summary as RERUN.

They start several processes on machines that other people load, too: a process that gets no CPU for seconds fails a
test without a fault of ours. A fault that is there every time still fails, and one that comes and goes is shown.
"""

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKRING_DEVICE", "cpu")  # servers of tests compute alike on machines with a GPU

TESTS = Path(__file__).parent
WITH_SERVERS = {"acceptance", "bench", "chaos", "fuzz", "offline", "process", "proxies", "top"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if TESTS in item.path.parents and item.path.relative_to(TESTS).parts[0] in WITH_SERVERS:
            item.add_marker(pytest.mark.flaky(reruns=2))
