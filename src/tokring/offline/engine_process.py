"""EngineProcess: an engine child of this process, wired to one channel as the supervisor would do it."""

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import Any

from tokring.config import Config
from tokring.launch.channel_wiring import ChannelWiring
from tokring.launch.child import ChannelEnds
from tokring.launch.child_process import ChildProcess, FatalError
from tokring.launch.log_merge import LineReader
from tokring.launch.stats_pages import StatsPages
from tokring.offline.errors import EngineDied
from tokring_ipc import StatsPage

END_GRACE_S = 3.0  # then it is killed


class EngineProcess:
    """A running engine. Belongs to one thread and its loop: the child is killed by the kernel when that thread ends."""

    def __init__(self, config: Config) -> None:
        """Starts the child; call on the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[str] = self._loop.create_future()  # how it ended, in words
        self._fatal: FatalError | None = None
        self._pages = StatsPages(num_frontends=1)
        self._wiring = ChannelWiring.create(0, 0)
        try:
            self._child = ChildProcess.spawn("engine", 0, config, self._pages.names, [self._wiring.engine_ends])
        except BaseException:
            self._wiring.close()
            self._pages.close()
            raise
        # While we hold them too, the child's death would not end the channel's control socket.
        self._wiring.close_ends(self._wiring.engine_ends)
        self._loop.add_reader(self._child.pidfd, self._on_exit)
        self._loop.add_reader(self._child.link, self._on_message)
        for reader in (self._child.stdout, self._child.stderr):
            self._loop.add_reader(reader.fd, self._copy_lines, reader)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def page(self) -> StatsPage:
        """The front end's stats page, written by this process."""
        return self._pages.of(("frontend", 0))

    def take_channel_ends(self) -> ChannelEnds:
        """The front end's descriptors: a control socket for the caller to close, doorbells that stay ours."""
        ends = self._wiring.frontend_ends
        return ChannelEnds(
            frontend=0,
            engine=0,
            control_fd=os.dup(ends.control_fd),
            req_doorbell_fd=ends.req_doorbell_fd,
            out_doorbell_fd=ends.out_doorbell_fd,
        )

    def died(self, description: str) -> EngineDied:
        """The exception for callers who needed it, with what it said last."""
        if self._fatal is not None:
            trace = f"\n{self._fatal.traceback}" if self._fatal.traceback else ""
            return EngineDied(f"the engine process {description}: {self._fatal.error}{trace}")
        last_lines = "".join(f"\n    {line}" for line in self._child.last_lines())
        said = f"; its last words:{last_lines}" if last_lines else ""
        return EngineDied(f"the engine process (pid {self.pid}) {description}{said}")

    async def close(self) -> None:
        """Asks it to end, kills it if it does not, and removes the stats pages. Idempotent."""
        if not self.exited.done():
            self._child.send("shutdown", deadline_s=0.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.exited), END_GRACE_S)
        if not self.exited.done():
            self._child.kill()
            with contextlib.suppress(TimeoutError):  # stuck in the kernel: it dies when that lets go
                await asyncio.wait_for(asyncio.shield(self.exited), END_GRACE_S)
        self._wiring.close()
        self._pages.close()

    def _on_message(self) -> None:
        while (message := self._child.receive()) is not None:
            self._take_message(message)

    def _take_message(self, message: dict[str, Any]) -> None:
        if message.get("type") == "fatal":
            self._fatal = FatalError(str(message.get("error")), message.get("traceback"))

    def _copy_lines(self, reader: LineReader) -> None:
        lines, closed = reader.read_lines()
        if lines:
            sys.stderr.write(lines.decode(errors="replace"))
        if closed:
            self._loop.remove_reader(reader.fd)

    def _on_exit(self) -> None:
        child = self._child
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.reap()
        self._on_message()  # its last words
        for reader in (child.stdout, child.stderr):
            self._copy_lines(reader)
        for fd in (child.pidfd, child.link.fileno(), child.stdout.fd, child.stderr.fd):
            self._loop.remove_reader(fd)
        child.close()
        self.exited.set_result(child.describe_end())
