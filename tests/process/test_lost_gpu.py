"""A server that began on a GPU goes on there or not at all; a stand-in for the GPU can be lost and be full."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.serving import ServerProcess, tiny_model, wait_until

REPOSITORY = Path(__file__).parents[2]
Start = Callable[..., ServerProcess]


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """The file that says what is wrong with the GPU."""
    return tmp_path / "gpu"


@pytest.fixture
def start(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=":")
    servers = []

    def start_with(*arguments: str) -> ServerProcess:
        arguments = ("--port", "0", "--model", tiny_model(), "--device", "auto", *arguments)
        server = ServerProcess(arguments, {"TOKRING_TEST_GPU": str(gpu)}, "tests.support.lost_gpu_engine")
        servers.append(server)
        return server

    yield start_with
    for server in servers:
        server.kill()


def kill_engine(server: ServerProcess) -> None:
    server.children()["engine 0"].send_signal(signal.SIGKILL)


LOST = (
    r"engine 0 \(pid \d+\) exited with code 1 "
    r"\(DeviceFailure: this server computes by CUDA, which can't be used any more: it has fallen off the bus\); "
)


CAUSES = {
    "lost": LOST,
    "full": r"\(DeviceFailure: out of GPU memory while the weights were loaded\); ",
    "nearly full": r"\(DeviceFailure: KV cache: one sequence needs more than there is\); ",
}


@pytest.mark.parametrize("wrong", CAUSES)
def test_a_restarted_engine_waits_for_its_gpu_instead_of_taking_the_cpu(start: Start, gpu: Path, wrong: str) -> None:
    server = start("--engine-restarts", "20")
    server.wait_ready()
    gpu.write_text(wrong)
    kill_engine(server)
    found = re.compile(CAUSES[wrong] + "another one starts in")
    wait_until(lambda: len(found.findall(server.log)) >= 2, "two engines can't use the GPU")
    assert server.health() == 503
    gpu.unlink()
    wait_until(lambda: server.health() == 200, "the GPU is back")
    assert "computing on the CPU" not in server.log
    assert server.log.count("computing on a stand-in for a GPU") >= 2


def test_a_gpu_that_stays_away_ends_the_server_as_any_other_death_does(start: Start, gpu: Path) -> None:
    server = start("--engine-restarts", "2")
    server.wait_ready()
    gpu.write_text("lost")
    kill_engine(server)
    assert server.wait_end() == 1
    assert len(re.findall(LOST + "another one", server.log)) == 1  # the first death was the kill
    assert re.search(LOST + "ending the server", server.log)
    assert "computing on the CPU" not in server.log


def test_a_server_that_began_on_the_cpu_stays_there(start: Start, gpu: Path) -> None:
    gpu.write_text("lost")
    server = start()
    server.wait_ready()
    gpu.unlink()
    kill_engine(server)
    wait_until(lambda: "engine 0 is back" in server.log, "the engine is back")
    assert "CUDA can't be used: it has fallen off the bus" in server.log
    assert "a stand-in for a GPU" not in server.log


def test_a_restarted_engine_waits_for_memory_that_somebody_else_has_taken(start: Start, gpu: Path) -> None:
    gpu.write_text("lost")  # so it computes on the CPU
    server = start("--engine-restarts", "20")
    server.wait_ready()
    gpu.write_text("nearly full")
    kill_engine(server)
    found = re.compile(r"\(MemoryError: KV cache: one sequence needs more than there is\); another one starts in")
    wait_until(lambda: len(found.findall(server.log)) >= 2, "two engines have too little memory")
    assert server.health() == 503
    gpu.unlink()
    wait_until(lambda: server.health() == 200, "there is memory again")


def test_a_gpu_that_fails_at_the_first_start_ends_it_in_one_line(start: Start, gpu: Path) -> None:
    gpu.write_text("full")
    server = start()
    assert server.wait_end() == 1
    errors = [line.partition(" ERROR ")[2] for line in server.lines if " ERROR " in line]
    assert errors == ["--device auto: out of GPU memory while the weights were loaded"]
    assert "Traceback" not in server.log
