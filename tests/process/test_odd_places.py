"""Servers where memory, descriptors, file systems, users or cores are not what one is used to."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest

from tests.process.test_engine_restart import ask, metric, num_running
from tests.process.test_frontend_restart import answer, kill, post, stopped, text_of
from tests.process.test_lost_channel import BODY
from tests.support.own_namespace import needs_mounts, run_script
from tests.support.serving import START_DEADLINE_S, ServerProcess, mock_server, tiny_model, wait_until
from tests.support.tiny_hf import write_tiny_hf

NUM_KILLS = int(os.environ.get("TOKRING_TEST_KILLS", "2"))  # p04: 10 in the long form
STOP_S = float(os.environ.get("TOKRING_TEST_STOP_S", "3"))  # p07: 60 in the long form
ASK_ALL_KINDS = """
import os, stat
from contextlib import ExitStack
from tests.process.test_engine_restart import ask, requests
from tests.support.serving import running_server
def serve():
    stack = ExitStack()
    return stack, stack.enter_context(running_server("--engine", "mock", "--model", os.environ["MODEL"]))
def ask_all_kinds(server):
    return [sorted(ask(server.url, *one)[1].values()) for one in requests(4)]
"""
CPU_CGROUPS = {  # mount -> what to write for a fifth of a core
    "/sys/fs/cgroup/cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "20000"},
    "/sys/fs/cgroup": {"cpu.max": "20000 100000"},
}


def test_both_sides_killed_at_once_again_and_again_leave_as_much_behind_as_once(tmp_path: Path) -> None:
    """p04, and the supervisor with them: what is left of it is what the next start finds."""
    left: list[int] = []
    for _ in range(NUM_KILLS):
        with (
            mock_server("--mock-step-ms", "5", environment={"TMPDIR": str(tmp_path)}) as server,
            post(server.url, stream=True, max_tokens=4000) as stream,
        ):
            assert stream.readline().startswith(b"data: ")
            processes = [psutil.Process(server.pid), *server.children().values()]
            for process in processes:
                process.kill()
            with pytest.raises((HTTPException, OSError)):
                stream.read()
            server.wait_end()
            left.append(len(server.pages()))
    assert len(set(left)) == 1
    assert list(tmp_path.iterdir()) == []
    with mock_server() as server:
        assert not any(Path("/dev/shm").glob(f"tokring.{processes[0].pid}.*"))
        assert answer(server)["usage"]["completion_tokens"] == 4


def test_an_engine_whose_memory_ends_is_followed_by_another_and_the_log_says_why_once() -> None:
    """p05"""
    with mock_server("--step-timeout", "3") as server:
        engine = server.children()["engine 0"]
        limit = engine.memory_info().vms
        resource.prlimit(engine.pid, resource.RLIMIT_AS, (limit, limit))
        # The first constraint needs threads, and those need stacks. Python's threading waits for ever for a thread
        # that could not begin: then it is a hang, and the stacks in the log say where.
        body = {"prompt": [7], "max_tokens": 40, "structured_outputs": {"regex": "[a-z]{5}"}}
        assert ask(server.url, "completions", body)[1] == {0: "stop"}
        assert server.children()["engine 0"] != engine
        assert len(re.findall(rf"engine 0 \(pid {engine.pid}\) .*; another one starts", server.log)) == 1
        assert "in _start_threads" in server.log
        server.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0


def test_a_front_end_that_stands_still_under_load_goes_on_with_every_stream() -> None:
    """p07"""
    with mock_server("--mock-step-ms", "5", "--step-timeout", str(STOP_S + 60)) as server:
        bodies = [{**BODY, "seed": index, "max_tokens": 500} for index in range(16)]
        with ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(ask, server.url, "completions", body) for body in bodies]
            wait_until(lambda: num_running(server) == 16, "all run")
            frontend = server.children()["frontend 0"]
            steps = metric_of_engine(server)
            frontend.suspend()
            wait_until(lambda: metric_of_engine(server) > steps, "the engine goes on meanwhile")
            ends = time.monotonic() + STOP_S
            wait_until(lambda: time.monotonic() >= ends, "time has passed", STOP_S + 30)
            frontend.resume()
            done = [one.result(START_DEADLINE_S) for one in answers]
        assert [one[2]["completion_tokens"] for one in done] == [500] * 16
        assert answer(server)["usage"]["completion_tokens"] == 4
        assert metric(server, "engine_restarts") == metric(server, "frontend_restarts") == 0


def metric_of_engine(server: ServerProcess) -> int:
    """Steps that the engine has made, from its page: the front end may stand still."""
    from tokring_ipc import Role, StatsPage, list_pages

    [name] = [page.name for page in list_pages(f"/tokring.{server.pid}.") if page.role == Role.ENGINE]
    with StatsPage.attach(name) as page:
        return page.get("steps")


@needs_mounts
def test_a_dev_shm_that_others_fill_while_we_serve_does_no_harm() -> None:
    """p14"""
    script = (
        ASK_ALL_KINDS
        + """
stack, server = serve()
before = ask_all_kinds(server)
try:
    with open("/dev/shm/filler", "wb") as filler:
        while True:
            filler.write(bytes(65536))
except OSError as error:
    print(error.strerror)
assert os.statvfs("/dev/shm").f_bavail == 0
for _ in range(4):
    assert ask_all_kinds(server) == before
long = {"prompt": [1 + index % 300 for index in range(8000)], "max_tokens": 5, "ignore_eos": True}
print(ask(server.url, "completions", long)[1], server.log.count(" ERROR "))
stack.close()
"""
    )
    mount = "mount -t tmpfs -o size=4m tmpfs /dev/shm"
    out = run_script(script, prepare=mount, environment={"MODEL": tiny_model()})
    assert out == "No space left on device\n{0: 'length'} 0\n"


def test_damaged_files_under_our_names_and_a_living_process_with_a_dead_ones_number() -> None:
    """p15, p16: stale is what nobody holds locked, whatever its name says."""
    with subprocess.Popen(["sleep", "1000"]) as harmless:
        prefix = f"/dev/shm/tokring.{harmless.pid}.00c0ffee"
        files = {
            f"{prefix}.engine.{index}": content for index, content in enumerate([b"", os.urandom(5000), b"\0" * 99])
        }
        try:
            for name, content in files.items():
                Path(name).write_bytes(content)
            Path(f"{prefix}.engine.1").chmod(0)
            Path(f"{prefix}.engine.7").mkdir()
            if os.getuid() == 0:
                Path(f"{prefix}.engine.8").touch()
                os.chown(f"{prefix}.engine.8", 12345, 12345)
            with mock_server() as server:
                assert answer(server)["usage"]["completion_tokens"] == 4
                left = {path.name.rpartition(".")[2] for path in Path("/dev/shm").glob(f"{Path(prefix).name}.*")}
                assert left == ({"7", "8"} if os.getuid() == 0 else {"1", "7"})
            assert harmless.poll() is None
        finally:
            harmless.kill()
            for path in Path("/dev/shm").glob(f"{Path(prefix).name}.*"):
                path.rmdir() if path.is_dir() else path.unlink()


def has_gone_on(server: ServerProcess, times: int) -> bool:
    """With one stream, after the death of an engine."""
    return server.log.count("engine 0 is back: it goes on with 1 requests") == times


def test_at_the_limit_of_descriptors_streams_go_on_nobody_spins_and_later_requests_work() -> None:
    """p21"""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    server = ServerProcess(
        (
            "64",
            "-m",
            "tokring",
            "serve",
            "--port",
            "0",
            "--engine",
            "mock",
            "--model",
            tiny_model(),
            "--mock-step-ms",
            "5",
        ),
        program="tests.support.with_few_descriptors",
        command="--",
    )
    try:
        server.wait_ready()
        assert "hard limit of open files is 64" in server.log
        port = int(server.url.rpartition(":")[2])
        frontend = server.children()["frontend 0"]
        with post(server.url, stream=True, max_tokens=400) as stream:
            assert stream.readline().startswith(b"data: ")
            idle = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(200)]
            wait_until(lambda: frontend.num_fds() >= 60, "the limit is reached")
            cpu_s = sum(frontend.cpu_times()[:2])
            assert text_of(b"data: " + stream.read().partition(b"data: ")[2])
            assert sum(frontend.cpu_times()[:2]) - cpu_s < 1.5  # over the two seconds and more of the stream
        for connection in idle:
            connection.close()
        wait_until(lambda: server.health() == 200, "it answers again")
        # There is room for the channels of the next engines nevertheless.
        expected = answer(server, 400)["choices"][0]["text"]
        with post(server.url, stream=True, max_tokens=400) as stream:
            first_line = stream.readline()
            for num_kills in (1, 2):
                idle += [socket.create_connection(("127.0.0.1", port), 10) for _ in range(200)]
                wait_until(lambda: frontend.num_fds() >= 60, "the limit is reached")
                server.children()["engine 0"].kill()
                wait_until(partial(has_gone_on, server, num_kills), "the stream goes on")
            assert text_of(first_line + stream.read()) == expected
        for connection in idle:
            connection.close()
        assert server.children()["frontend 0"] == frontend
    finally:
        server.kill()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard


def test_clients_that_keep_coming_at_the_limit_of_descriptors_do_not_take_those_of_the_next_engines_channel() -> None:
    """p21: however long the engine takes to start, and however often it dies."""
    arguments = ("serve", "--port", "0", "--engine", "mock", "--model", tiny_model(), "--mock-step-ms", "5")
    server = ServerProcess(
        ("64", "-m", "tokring", *arguments), program="tests.support.with_few_descriptors", command="--"
    )
    try:
        server.wait_ready()
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        frontend = server.children()["frontend 0"]
        expected = answer(server, 600)["choices"][0]["text"]
        with contextlib.ExitStack() as crowd:

            def is_full() -> bool:
                for _ in range(8):
                    crowd.enter_context(socket.create_connection(address, 10))
                return frontend.num_fds() >= 62  # a connection that is served needs two more

            stream = crowd.enter_context(post(server.url, stream=True, max_tokens=600))
            first_line = stream.readline()
            for num_kills in range(1, 5):
                wait_until(is_full, "the limit is reached")
                next_engine = kill(server, "engine 0")
                with stopped(next_engine):
                    for _ in range(10):
                        wait_until(is_full, "all descriptors are taken while the front end waits for the engine")
                wait_until(partial(has_gone_on, server, num_kills), "the stream goes on")
            assert text_of(first_line + stream.read()) == expected
        assert server.children()["frontend 0"] == frontend
    finally:
        server.kill()


ANOTHER_USER = ("setpriv", "--reuid", "12345", "--regid", "0", "--clear-groups")
CAN_BECOME_ANOTHER = subprocess.run([*ANOTHER_USER, "test", "-x", os.path.realpath(sys.executable)]).returncode == 0


@needs_mounts
@pytest.mark.skipif(not CAN_BECOME_ANOTHER, reason="needs the right to become another user, who may run this Python")
def test_a_user_without_name_home_or_a_place_to_write_is_served_and_readable_by_nobody() -> None:
    """p24, p25"""
    script = (
        ASK_ALL_KINDS
        + """
os.umask(0o077)
stack, server = serve()
print(os.getuid(), set(map(len, ask_all_kinds(server))) == {1, 2})
found = [page.stat() for page in server.pages()]
print({oct(stat.S_IMODE(page.st_mode)) for page in found}, {page.st_uid for page in found})
print(server.log.count(" ERROR "), server.log.count(" WARNING "))
stack.close()
"""
    )
    with tempfile.TemporaryDirectory(prefix="tokring-test-readable-") as directory:
        write_tiny_hf(Path(directory), max_position_embeddings=8192)
        for path in (Path(directory), *Path(directory).rglob("*")):
            path.chmod(0o755)
        foreign = Path("/dev/shm", f"tokring.{os.getpid()}.00c0ffee.engine.0")
        foreign.write_bytes(b"another user's")
        try:
            out = run_script(
                script,
                prepare="mount -o remount,bind,ro / && unset TMPDIR",
                prefix=ANOTHER_USER,
                environment={"MODEL": directory, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"},
            )
        finally:
            foreign.unlink(missing_ok=True)  # a server of root, started meanwhile, may have swept it
    assert out == "12345 True\n{'0o600'} {12345}\n0 0\n"


STARTED_BY_FORK = """
import multiprocessing, sys, threading
import numpy
from tokring.cli import main
if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    numpy.ones((300, 300)) @ numpy.ones((300, 300))
    child = multiprocessing.get_context("fork").Process(target=main, args=(sys.argv[1:],))
    child.start()
    print(child.pid, flush=True)
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("how", ["fork", "stdin"])
def test_started_by_fork_from_a_process_with_threads_or_from_standard_input(how: str, tmp_path: Path) -> None:
    """p26"""
    path = tmp_path / "tokring.sock"
    arguments = ["serve", "--engine", "mock", "--model", tiny_model(), "--uds", str(path)]
    script = (
        STARTED_BY_FORK if how == "fork" else "import sys\nfrom tokring.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    start = ["-c", script] if how == "fork" else ["-"]
    with subprocess.Popen(
        [sys.executable, *start, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            pid = process.pid
            if how == "fork":
                pid = int(process.stdout.readline())
            else:
                process.stdin.write(script)
            process.stdin.close()
            body = json.dumps({"prompt": "Hello", "max_tokens": 4, "ignore_eos": True})
            command = ["curl", "-s", "--unix-socket", str(path), "-d", body, "-H", "Content-Type: application/json"]

            def is_answered() -> bool:
                done = subprocess.run([*command, "http://x/v1/completions"], capture_output=True, text=True, timeout=60)
                return '"completion_tokens":4' in done.stdout

            wait_until(is_answered, "it is served", START_DEADLINE_S)
            os.kill(pid, signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_on_one_core_both_sides_get_on_without_starving_each_other() -> None:
    """p27"""
    core = {min(os.sched_getaffinity(0))}
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core)  # of this thread; inherited
    try:
        with mock_server("--mock-step-ms", "1") as server:
            assert all(child.cpu_affinity() == list(core) for child in server.children().values())
            os.sched_setaffinity(0, allowed)
            with ThreadPoolExecutor(5) as pool:
                done = list(pool.map(lambda _: ask(server.url, "completions", {**BODY, "max_tokens": 40}), range(20)))
            assert [one[2]["completion_tokens"] for one in done] == [40] * 20
            assert metric(server, "hung_processes") == 0
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.fixture
def a_fifth_of_a_core() -> Iterator[Callable[[int], None]]:
    """Puts processes under a CPU limit of 0.2 by a cgroup of version 1 or 2, where that is allowed."""
    for mount, files in CPU_CGROUPS.items():
        group = Path(mount, f"tokring-test-{os.getpid()}")
        try:
            group.mkdir()
            for name, text in files.items():
                (group / name).write_text(text)
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        members = group / "cgroup.procs"
        yield lambda pid, members=members: members.write_text(str(pid))  # type: ignore[misc]
        wait_until(lambda members=members: not members.read_text(), "the group is empty")  # type: ignore[misc]
        group.rmdir()
        return
    pytest.skip("needs the right to make a cgroup")


def test_under_a_cpu_limit_requests_get_on_and_nobody_takes_slowness_for_a_hang(
    a_fifth_of_a_core: Callable[[int], None],
) -> None:
    """p27"""
    with mock_server("--mock-step-ms", "1", "--step-timeout", "10") as server:
        for process in (psutil.Process(server.pid), *server.children().values()):
            a_fifth_of_a_core(process.pid)
        with ThreadPoolExecutor(5) as pool:
            done = list(pool.map(lambda _: ask(server.url, "completions", {**BODY, "max_tokens": 20}), range(20)))
        assert [one[2]["completion_tokens"] for one in done] == [20] * 20
        assert metric(server, "hung_processes") == 0
        server.kill()
