"""One spawned child as the supervisor sees it: process, pidfd, log pipes and message socket."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tokring.config import Config, Device
from tokring.launch.channel_wiring import fds_of
from tokring.launch.child import MAX_MESSAGE_BYTES, RELAYED_SIGNALS, ChannelEnds, ChildSetup, StatsPageNames
from tokring.launch.log_merge import LineReader

Role = Literal["frontend", "engine"]
Place = tuple[Role, int]  # role and index: held by one process after the other
NUM_LAST_LINES = 8
MODULE_OF_ROLE = {"frontend": "tokring.server", "engine": "tokring.engine"}


@dataclass(frozen=True, slots=True)
class FatalError:
    """What a child said before it ended. No traceback: the text is meant for the user as it is."""

    error: str
    traceback: str | None


class ChildProcess:
    """A running child. `spawn` starts it; the supervisor's loop reads its descriptors."""

    def __init__(
        self,
        role: Role,
        index: int,
        process: "subprocess.Popen[bytes]",
        link: socket.socket,
        log_format: Literal["text", "json"] = "text",
    ) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.role = role
        self.index = index
        self.process = process
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.link = link
        self.has_hung_up = False  # it has closed its end of the link, and may live on
        tag = f"{role} {index} {process.pid}"
        self.stdout = LineReader(process.stdout.fileno(), tag, log_format)
        self.stderr = LineReader(process.stderr.fileno(), tag, log_format)
        self.spawned = time.monotonic()
        self.progress_at_spawn = 0  # of its place, see StatsPages.progress
        self.phase = "starting"
        self.is_ready = False
        self.ready_since = 0.0  # time.monotonic()
        self.is_hung = False
        self.channel_number = 0  # of a front end: its present channel; a message about an older one is too late
        self.can_reconnect = False  # what it says about the channel that it has lost
        self.reconnected = -math.inf  # time.monotonic()
        # ---- deadlines, in time.monotonic(); math.inf: none ----
        self.kill_at = math.inf  # it was asked to end, or hangs
        self.ready_by = math.inf  # one that was started while the server ran; then it is killed
        self.reconnect_at = math.inf  # a front end that has lost its channel, unless its engine has died
        self.is_retiring = False  # replaced; ends by itself when its connections have
        self.fatal: FatalError | None = None
        self.was_killed = False  # by us
        self.exit_code: int | None = None  # negative: ended by that signal

    @classmethod
    def spawn(
        cls,
        role: Role,
        index: int,
        config: Config,
        stats_pages: StatsPageNames,
        channels: Iterable[ChannelEnds],
        listen_fds: tuple[int, ...] = (),
        listens_at_once: bool = True,
        device: Device | None = None,
        step_rows_fd: int = -1,
        vetted_grammars_fd: int = -1,
    ) -> "ChildProcess":
        """Starts `python -m tokring.server|engine`. On the main thread only: the child dies with its spawner.

        Raises OSError if there are no descriptors, processes or memory for it; then nothing of it is left.
        """
        channels = tuple(channels)
        link, child_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_link, contextlib.ExitStack() as on_failure:
            on_failure.enter_context(link)
            link.setblocking(False)
            setup = ChildSetup(
                role=role,
                index=index,
                config=config,
                supervisor_pid=os.getpid(),
                supervisor_fd=child_link.fileno(),
                stats_page=getattr(stats_pages, role)[index],
                stats_pages=stats_pages,
                channels=channels,
                listen_fds=listen_fds,
                listens_at_once=listens_at_once,
                device=device,
                step_rows_fd=step_rows_fd,
                vetted_grammars_fd=vetted_grammars_fd,
            )
            setup_fd = readable_with(msgspec.json.encode(setup))
            passed_fds = [fd for ends in channels for fd in fds_of(ends)]
            passed_fds += [fd for fd in (step_rows_fd, vetted_grammars_fd) if fd >= 0]
            # Blocked until the child has its own handlers: a Ctrl-C in between must neither kill it nor be lost.
            old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, RELAYED_SIGNALS)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE_OF_ROLE[role], "--config-fd", str(setup_fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(setup_fd, child_link.fileno(), *passed_fds, *listen_fds),
                    env=child_environment(),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
                os.close(setup_fd)
            on_failure.enter_context(process)  # closes its pipes and waits for it
            on_failure.callback(process.kill)
            child = cls(role, index, process, link, config.launch.log_format)
            on_failure.pop_all()
        return child

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def place(self) -> Place:
        return self.role, self.index

    def send(self, kind: str, **content: Any) -> None:
        """Sends a message; a child that is gone or does not read misses it and is killed in time."""
        self.send_fds((), kind, **content)

    def send_fds(self, fds: Sequence[int], kind: str, **content: Any) -> None:
        """The same with copies of descriptors."""
        with contextlib.suppress(OSError):
            self._send(fds, kind, content)

    def _send(self, fds: Sequence[int], kind: str, content: dict[str, Any]) -> None:
        socket.send_fds(self.link, [msgspec.json.encode({"type": kind, **content})], fds, socket.MSG_NOSIGNAL)

    def send_channel(self, fds: Sequence[int], *, engine_died_by_itself: bool) -> None:
        """To a front end: its ends of another channel, and the step rows of the dead engine if that is why.

        One that can't be told, as it has not read for so long, is killed: it would wait for a channel for ever.
        """
        self.channel_number += 1
        self.reconnect_at = math.inf
        content = {"number": self.channel_number, "engine_died_by_itself": engine_died_by_itself}
        try:
            self._send(fds, "channel", content)
        except ConnectionError:  # it is gone
            pass
        except OSError:
            self.kill()

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if there is none (any more). Raises ValueError if it is none of ours."""
        try:
            data = self.link.recv(MAX_MESSAGE_BYTES)
        except OSError:
            return None
        self.has_hung_up = not data
        return msgspec.json.decode(data, type=dict[str, Any]) if data else None

    def show_stacks(self) -> None:
        """Asks for the Python stacks of all its threads (faulthandler); one that cannot run writes none."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)

    def kill(self) -> None:
        self.was_killed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int:
        """Collects the exit code of an ended process."""
        self.exit_code = self.process.wait()
        return self.exit_code

    def describe_end(self) -> str:
        """How it ended, in words: "exited with code 1 (ValueError: ...)", "was ended by SIGSEGV"."""
        assert self.exit_code is not None
        if self.exit_code >= 0:
            error = self.fatal.error.strip() if self.fatal else ""
            return f"exited with code {self.exit_code}" + (f" ({error.splitlines()[0][:300]})" if error else "")
        try:
            return f"was ended by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"was ended by signal {-self.exit_code}"

    def last_lines(self) -> list[str]:
        """The end of its standard error."""
        return list(self.stderr.tail)[-NUM_LAST_LINES:]

    def close(self) -> None:
        """Releases the descriptors of an ended child."""
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
        self.link.close()
        os.close(self.pidfd)


def readable_with(data: bytes) -> int:
    """A descriptor from which `data` can be read once, to its end. It has no name and no size limit."""
    fd = os.memfd_create("tokring-setup", os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def child_environment() -> dict[str, str]:
    """Our environment without what speaks to the supervisor alone."""
    not_for_children = ("LISTEN_", "NOTIFY_SOCKET", "WATCHDOG_")
    return {name: value for name, value in os.environ.items() if not name.startswith(not_for_children)}
