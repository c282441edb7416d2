"""What is done to the server: kills, stops, rude clients, garbage, a full log. Everything is counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.chaos.client import request_bytes
from tests.chaos.server_watch import ServerWatch

POLL_S = 0.005
BACK_DEADLINE_S = 120.0  # for an engine or front end to come back; what is measured is far below
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends a reset


class Adversary:
    """One coroutine for each kind of mischief; all run until `stop` is set."""

    def __init__(self, watch: ServerWatch, address: tuple[str, int], seed: int) -> None:
        self.stop = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.recovery_s: list[float] = []  # engine kill to the next token that a client got
        self.killed_ports: list[tuple[float, frozenset[int]]] = []  # (when, client ports whose front end was killed)
        self.last_token_time: Callable[[], float] = lambda: 0.0  # set by who knows the load; the event loop's time
        self.undone: dict[str, int] = {}  # kill -> how many are still to be made
        self._watch = watch
        self._address = address
        self._random = random.Random(seed)
        self._kills = asyncio.Lock()  # one death at a time: each recovery is measured by itself

    # ---- engine ----

    async def kill_engines(self, count: int, mean_pause_s: float) -> None:
        self.undone["engine"] = count
        while self.undone["engine"]:
            await asyncio.sleep(self._random.uniform(0.2, 1.8) * mean_pause_s)
            async with self._kills:
                await self._kill_engine()
            self.undone["engine"] -= 1

    async def _kill_engine(self) -> None:
        """SIGKILL at a random moment of the engine's life, then the time to the next token."""
        loop = asyncio.get_running_loop()
        engine = await self._wait_for_process("engine 0")
        restarts = self._watch.supervisor.get("engine_restarts")
        killed = loop.time()
        engine.send_signal(signal.SIGKILL)
        self.counts["engine SIGKILL"] += 1
        await self._until(lambda: self._watch.supervisor.get("engine_restarts") > restarts, "the engine is restarted")
        await self._until(self._watch.engine_is_ready, "the engine is ready")
        ready = loop.time()
        await self._until(lambda: self.last_token_time() > ready, "tokens come again")
        self.recovery_s.append(self.last_token_time() - killed)

    # ---- front ends ----

    async def kill_front_ends(self, count: int, mean_pause_s: float, num_front_ends: int) -> None:
        self.undone["front end"] = count
        while self.undone["front end"]:
            await asyncio.sleep(self._random.uniform(0.2, 1.8) * mean_pause_s)
            async with self._kills:
                await self._kill_front_end(f"frontend {self._random.randrange(num_front_ends)}")
            self.undone["front end"] -= 1

    async def _kill_front_end(self, name: str) -> None:
        """Stopped first: whose connections it has is known exactly then."""
        victim = await self._wait_for_process(name)
        restarts = self._watch.supervisor.get("frontend_restarts")
        victim.send_signal(signal.SIGSTOP)
        await self._until(lambda: victim.status() == psutil.STATUS_STOPPED, f"{name} stands still")
        ports = frozenset(connection.raddr.port for connection in victim.net_connections("tcp") if connection.raddr)
        self.killed_ports.append((asyncio.get_running_loop().time(), ports))
        victim.send_signal(signal.SIGKILL)
        self.counts["front end SIGKILL"] += 1
        await self._until(lambda: self._watch.supervisor.get("frontend_restarts") > restarts, f"{name} is restarted")

    # ---- stops ----

    async def stop_processes(self, mean_pause_s: float, longest_s: float, num_front_ends: int) -> None:
        names = ["engine 0", *(f"frontend {index}" for index in range(num_front_ends))]
        while not await self._rest(mean_pause_s):
            async with self._kills:  # none of them while a recovery is timed
                process = self._watch.process(self._random.choice(names))
                if process is None:
                    continue
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)
                    self.counts["SIGSTOP"] += 1
                    await asyncio.sleep(self._random.uniform(0.05, longest_s))
                    process.send_signal(signal.SIGCONT)

    # ---- clients ----

    async def disconnect(self, mean_pause_s: float) -> None:
        """Clients that go in the middle of a stream, politely or by a reset."""
        body = {"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        while not await self._rest(mean_pause_s):
            client = await self._connect()
            if client is None:
                continue
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._random.uniform(0.0, 1.0)):
                    await loop.sock_sendall(client, request_bytes("completions", body))
                    while await loop.sock_recv(client, 65536):
                        pass
            if self._random.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            client.close()
            self.counts["client disconnect"] += 1

    async def send_garbage(self, mean_pause_s: float) -> None:
        """Bytes that are no request, half requests, and requests that are nonsense."""
        while not await self._rest(mean_pause_s):
            client = await self._connect()
            if client is None:
                continue
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await loop.sock_sendall(client, self._garbage())
                    await loop.sock_recv(client, 65536)
            client.close()
            self.counts["garbage input"] += 1

    def _garbage(self) -> bytes:
        good = request_bytes("completions", {"prompt": "Hello", "max_tokens": 5})
        mutated = bytearray(good)
        for _ in range(self._random.randint(1, 8)):
            mutated[self._random.randrange(len(mutated))] = self._random.randrange(256)
        nested = request_bytes("completions", {}).replace(b"{}", b"[" * 2)
        return self._random.choice(
            [
                self._random.randbytes(self._random.randint(1, 4000)),
                good[: self._random.randrange(len(good))],
                bytes(mutated),
                nested,
                request_bytes("completions", {"prompt": [10**9, -1], "max_tokens": -5, "temperature": "hot"}),
                request_bytes("chat/completions", {"messages": [{"role": "user"}], "response_format": {"type": "x"}}),
                b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x",
            ]
        )

    async def _connect(self) -> socket.socket | None:
        client = socket.socket()
        client.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(client, self._address)
        except OSError:
            client.close()
            return None
        return client

    # ---- the log's disk ----

    async def fill_log_disk(self, log: LogDisk, mean_pause_s: float) -> None:
        """The log's file system is full most of the time; now and then there is room again."""
        while not await self._rest(mean_pause_s):
            if log.fill():
                self.counts["log disk full"] += 1
            await asyncio.sleep(mean_pause_s)
            log.empty()

    # ---- waiting ----

    async def _wait_for_process(self, name: str) -> psutil.Process:
        """A child by its title: it has none yet while Python starts."""
        await self._until(lambda: self._watch.process(name) is not None, f"{name} runs")
        process = self._watch.process(name)
        assert process is not None
        return process

    async def _rest(self, mean_s: float) -> bool:
        """Waits about that long; True: it is time to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), self._random.uniform(0.2, 1.8) * mean_s)
        return self.stop.is_set()

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Raises TimeoutError naming what was waited for."""
        end = asyncio.get_running_loop().time() + BACK_DEADLINE_S
        while not condition():
            if asyncio.get_running_loop().time() > end:
                raise TimeoutError(f"not within {BACK_DEADLINE_S:g} s: {what}")
            await asyncio.sleep(POLL_S)


class LogDisk:
    """A tiny file system with the server's log on it; what is logged is kept whenever it is emptied."""

    def __init__(self, directory: Path, *, can_be_full: bool) -> None:
        self.can_be_full = can_be_full
        self.path = directory / "log"
        self._ballast = directory / "ballast"
        self._kept: list[str] = []
        self.path.touch()

    def fill(self) -> bool:
        """Leaves no byte; whether it is full."""
        with contextlib.suppress(OSError), open(self._ballast, "ab", buffering=0) as ballast:
            while ballast.write(bytes(4096)):
                pass
        return os.statvfs(self._ballast).f_bavail == 0

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)
        self._kept.append(self.path.read_text(errors="replace"))
        os.truncate(self.path, 0)

    def text(self) -> str:
        self.empty()
        return "".join(self._kept)
