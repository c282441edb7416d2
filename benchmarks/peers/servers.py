"""Launch: how a server is started; Fleet: the servers that run at present, each on a port of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from benchmarks.peers import weights
from benchmarks.peers.places import LLAMA_CPP_TOOLS, LOGS, TCMALLOC, VLLM, PeerError

START_DEADLINE_S = 1200.0  # vLLM compiles its model for minutes the first time
END_DEADLINE_S = 20.0
POLL_S = 0.05
VLLM_CACHE_GIB = 2
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class Launch:
    """One server's command; "{port}" in it stands for the port it gets. Equal launches can share one process."""

    name: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def tokring(name: str, model: Path, *options: str) -> Launch:
    limits = ("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS))
    command = (sys.executable, "-m", "tokring", "serve", str(model), "--port", "{port}", *limits, *options)
    return Launch(name, command)


def vllm(name: str, model: Path, *options: str) -> Launch:
    """Raises PeerError if it isn't installed. Its OpenMP threads are bound to the cores that this process may use."""
    if not (VLLM / ".installed").exists():
        raise PeerError("vLLM is not installed: python -m benchmarks.peers.install vllm")
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    preloaded = [*TCMALLOC.rglob("libtcmalloc_minimal.so.4"), VLLM / "lib/libiomp5.so"]
    environment = (
        ("VLLM_CPU_KVCACHE_SPACE", str(VLLM_CACHE_GIB)),
        ("VLLM_CPU_OMP_THREADS_BIND", cores),
        ("VLLM_CACHE_ROOT", str(VLLM / "cache")),
        ("LD_PRELOAD", ":".join(str(path) for path in preloaded if path.exists())),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("PYTHONPATH", ""),
    )
    command = (
        str(VLLM / "bin/python"), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16",
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS), *options,
    )  # fmt: skip
    return Launch(name, command, environment)


def llama_cpp(name: str, model: Path, num_slots: int, tokens_per_slot: int) -> Launch:
    """Raises PeerError if it isn't installed. All threads compute, for prompts too; flash attention is its fastest."""
    program = LLAMA_CPP_TOOLS / "llama-server"
    if not program.exists():
        raise PeerError("llama.cpp is not installed: python -m benchmarks.peers.install llama.cpp")
    threads = str(len(os.sched_getaffinity(0)))
    command = (
        str(program), "--model", str(model), "--host", "127.0.0.1", "--port", "{port}", "--no-webui",
        "--threads", threads, "--threads-batch", threads, "--batch-size", "2048", "--ubatch-size", "512",
        "--flash-attn", "on", "--parallel", str(num_slots), "--ctx-size", str(num_slots * tokens_per_slot),
    )  # fmt: skip
    return Launch(name, command)


@dataclass(slots=True)
class Server:
    """A running process group that listens on `port`."""

    launch: Launch
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def wait_ready(self, poll_s: float = POLL_S) -> None:
        """Raises PeerError if it ends or takes too long."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not self.is_ready():
            if self.process.poll() is not None:
                raise PeerError(
                    f"{self.launch.name} ended with {self.process.returncode} at start: {self._last_words()}"
                )
            if time.monotonic() > deadline:
                raise PeerError(f"{self.launch.name} was not ready after {START_DEADLINE_S:.0f} s; its log: {self.log}")
            time.sleep(poll_s)

    def stop(self) -> None:
        """Asks, then kills, the whole group."""
        try:
            self.process.terminate()
            self.process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        errors = [line for line in lines if "rror" in line]
        return f"{(errors or lines)[-1][:300]} ({self.log})"


class Fleet:
    """A context manager: whatever runs at its end is stopped."""

    def __init__(self) -> None:
        self.running: dict[Launch, Server] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep([])

    def keep(self, launches: Sequence[Launch]) -> None:
        """Stops all others."""
        for launch in [launch for launch in self.running if launch not in launches]:
            self.running.pop(launch).stop()

    def ensure(self, launch: Launch) -> Server:
        """The running server of this launch, started if there is none. Raises PeerError."""
        if launch not in self.running:
            server = start(launch)
            try:
                server.wait_ready()
            except BaseException:
                server.stop()
                raise
            self.running[launch] = server
        return self.running[launch]


def start(launch: Launch) -> Server:
    port = _free_port()
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{launch.name.replace(' ', '-')}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [word.replace("{port}", str(port)) for word in launch.command],
            env={**os.environ, **dict(launch.environment)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own: all of it is held, counted and ended together
        )
    return Server(launch, port, process, log)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def embedded(name: str, num_slots: int, tokens_per_slot: int) -> Launch:
    """The launch of a server of the embedded model, by the names that tables show. Raises PeerError."""
    match name:
        case "tokring":
            return tokring(name, weights.stored())
        case "tokring --cpu-fast":
            return tokring(name, weights.stored(), "--cpu-fast")
        case "tokring bf16":
            return tokring(name, weights.bfloat16_directory())
        case "vLLM bf16":
            return vllm(name, weights.bfloat16_directory())
        case "llama.cpp":
            return llama_cpp(name, weights.stored(), num_slots, tokens_per_slot)
        case "llama.cpp bf16":
            return llama_cpp(name, weights.bfloat16_gguf(), num_slots, tokens_per_slot)
        case _:
            raise PeerError(f"there is no server {name!r}")


def tiny(name: str) -> Launch:
    """Of the tiny model, which vLLM serves fastest without compiling it. Raises PeerError."""
    match name:
        case "tokring":
            return tokring(name, weights.tiny_directory())
        case "vLLM":
            return vllm(name, weights.tiny_directory(), "--enforce-eager")
        case _:
            raise PeerError(f"there is no server {name!r} of the tiny model")
