"""Starts a real `tokring serve` on a free port for a test, waits until it is healthy, and sees that nothing is left."""

import atexit
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from tests.support.tiny_hf import write_tiny_hf

START_DEADLINE_S = 90.0  # generous: CI has two cores and runs other things beside
END_DEADLINE_S = 45.0
POLL_S = 0.02
READY_LINE = re.compile(r'ready after [0-9.]+ s: ([^\s"]+)')


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = END_DEADLINE_S) -> None:
    """Polls until the condition holds. Raises TimeoutError naming what was waited for."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s} s: {what}")
        time.sleep(POLL_S)


class ServerProcess:
    """A running `tokring serve`; its log is collected line by line."""

    def __init__(
        self,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        program: str = "tokring",
        command: str = "serve",
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", program, command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            text=True,
            errors="replace",
        )
        self.pid = self.process.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """The address from the log; "" before the server is ready."""
        found = READY_LINE.search(self.log)
        return found.group(1) if found else ""

    def wait_ready(self) -> str:
        """Waits for the announcement and for /health (over TCP). Returns the base URL."""
        wait_until(lambda: self.url or self.process.poll() is not None, "the server is ready", START_DEADLINE_S)
        if not self.url:
            self._reader.join(5)
            raise RuntimeError(f"the server ended with code {self.process.returncode}:\n{self.log}")
        if self.url.startswith("http"):
            wait_until(lambda: self.health() == 200, "/health answers 200", START_DEADLINE_S)
        return self.url

    def health(self) -> int:
        """Status of /health; 0 if nobody answers."""
        try:
            with urlopen(f"{self.url}/health", timeout=10) as answer:
                return int(answer.status)
        except URLError as error:
            return int(getattr(error, "code", 0))
        except OSError:
            return 0

    def children(self) -> dict[str, psutil.Process]:
        """Child processes by title: "frontend 0", "engine 0"."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    title = " ".join(child.cmdline()).strip()
                    if title.startswith("tokring: "):
                        found[title.removeprefix("tokring: ")] = child
        return found

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_end(self, deadline_s: float = END_DEADLINE_S) -> int:
        """The exit code; the log is complete afterwards."""
        code = self.process.wait(deadline_s)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def pages(self) -> list[Path]:
        """What this server has in /dev/shm."""
        return list(Path("/dev/shm").glob(f"tokring.{self.pid}.*"))

    def kill(self) -> None:
        """Ends the whole tree at once, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.wait_end()


@contextlib.contextmanager
def running_server(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A ready server on a free port, unless `arguments` say otherwise; killed at the end if it still runs."""
    server = ServerProcess(("--port", "0", *arguments), environment)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


@functools.cache
def tiny_model() -> str:
    """Directory of a checkpoint with a small vocabulary and a long context, removed when the test run ends."""
    directory = tempfile.mkdtemp(prefix="tokring-test-model-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_tiny_hf(Path(directory), max_position_embeddings=8192)
    return directory


@contextlib.contextmanager
def mock_server(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A ready server with the mock engine and a small vocabulary: starts fast, computes nothing."""
    with running_server("--engine", "mock", "--model", tiny_model(), *arguments, environment=environment) as server:
        yield server
