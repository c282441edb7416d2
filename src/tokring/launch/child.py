"""The child's side of being launched: set-up from a pipe, signals, logs that never block, talk with the supervisor.

Used by `python -m tokring.server` and `python -m tokring.engine`:

    def main(setup: ChildSetup, supervisor: SupervisorLink) -> None: ...
    if __name__ == "__main__":
        run_child(main)
"""

import argparse
import contextlib
import ctypes
import faulthandler
import io
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec

from tokring.config import Config, ConfigError, Device, LaunchSettings
from tokring.launch.json_log import JsonFormatter
from tokring.launch.scheduling import ask_for_short_slices
from tokring.process_title import set_process_title

PR_SET_PDEATHSIG = 1
MAX_MESSAGE_BYTES = 64 * 1024
MAX_FDS = 8  # in one message
NUM_SPARE_FDS = 8  # for those of a message, or what is made of them
MAX_ERROR_CHARS = 12_000
RELAYED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SupervisorGone(Exception):
    """The supervisor closed its end: this process has no reason to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelEnds:
    """This process's descriptors of one channel; the doorbells are non-blocking pipe ends."""

    frontend: int  # index of the front end
    engine: int  # index of the engine
    control_fd: int  # SOCK_SEQPACKET, one end of a socketpair
    req_doorbell_fd: int  # write end in the front end, read end in the engine
    out_doorbell_fd: int  # read end in the front end, write end in the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsPageNames:
    """Names of every stats page of this server."""

    supervisor: str
    frontend: tuple[str, ...]
    engine: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSetup:
    """All that a child is told; written by the supervisor as JSON into the pipe `--config-fd`."""

    role: Literal["frontend", "engine"]
    index: int
    config: Config
    supervisor_pid: int
    supervisor_fd: int  # SOCK_SEQPACKET, one JSON object a packet
    stats_page: str  # the page this process writes
    stats_pages: StatsPageNames
    channels: tuple[ChannelEnds, ...]
    listen_fds: tuple[int, ...] = ()  # listening sockets, front ends only
    listens_at_once: bool = True  # answers 503 while it starts; else it accepts when it is ready
    device: Device | None = None  # what this server's engines compute on; None: the first of them chooses
    step_rows_fd: int = -1  # see tokring.step_rows; engines only
    vetted_grammars_fd: int = -1  # see tokring.vetted_grammars; engines only

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


class SupervisorLink:
    """The child's end of its socketpair with the supervisor. Never blocks.

    Keeps some descriptors back, so that a process whose clients have taken all others can still be given a channel.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._spare_fds: list[int] = []
        self.keep_fds(NUM_SPARE_FDS)

    def fileno(self) -> int:
        """For a selector or `loop.add_reader`."""
        return self._socket.fileno()

    def send(self, kind: str, **content: Any) -> bool:
        """Sends one message; False if the supervisor is gone or does not read."""
        try:
            self._socket.send(msgspec.json.encode({"type": kind, **content}), socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """The next message, e.g. {"type": "shutdown", "deadline_s": 30.0}; None if there is none yet.

        Descriptors that came with it are a list in its "fds", empty if there was no room for all of them. They belong
        to the caller, who makes something of them within lending_fds().
        Raises SupervisorGone when the supervisor's end is closed.
        """
        try:
            with self.lending_fds():
                data, fds, flags, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except ConnectionError:
            data, fds, flags = b"", [], 0
        if not data:
            raise SupervisorGone("the supervisor has closed its end")
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            fds = []
        message: dict[str, Any] = msgspec.json.decode(data)
        message["fds"] = fds
        return message

    @contextlib.contextmanager
    def lending_fds(self) -> Iterator[None]:
        """Those that are kept back are free for what is made in the block, which is not to wait for anything."""
        while self._spare_fds:
            os.close(self._spare_fds.pop())
        try:
            yield
        finally:
            self.keep_fds(self._num_spare)

    def keep_fds(self, num_spare: int) -> None:
        """From now on so many are kept back, or as many as there is room for."""
        self._num_spare = num_spare
        while len(self._spare_fds) > num_spare:
            os.close(self._spare_fds.pop())
        with contextlib.suppress(OSError):
            while len(self._spare_fds) < num_spare:
                self._spare_fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


class LossyWriter(io.RawIOBase):
    """A raw stream over a non-blocking pipe that drops what does not fit: a full log never blocks serving."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self.dropped_bytes = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        try:
            written = os.write(self._fd, view)
        except OSError:  # full, or its reader is gone
            written = 0
        self.dropped_bytes += len(view) - written
        return len(view)


def run_child(
    main: Callable[[ChildSetup, SupervisorLink], int | None], *, clean_errors: tuple[type[Exception], ...] = ()
) -> NoReturn:
    """Runs `main` as a child of the supervisor and exits with what it returns (None: 0).

    An exception is passed to the supervisor and ends the process with 1: those in `clean_errors` (and ConfigError) as
    their one line, meant for the user; all others with their traceback.
    """
    setup = read_setup()
    supervisor = SupervisorLink(setup.supervisor_fd)
    become_child(setup, supervisor)
    for_the_user: tuple[type[Exception], ...] = (ConfigError, *clean_errors)
    try:
        code = main(setup, supervisor) or 0
    except for_the_user as error:
        supervisor.send("fatal", error=str(error)[:MAX_ERROR_CHARS])
        code = 1
    except SupervisorGone:
        code = 1
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        supervisor.send("fatal", error=f"{type(error).__name__}: {error}"[:2000], traceback=text[-MAX_ERROR_CHARS:])
        code = 1
    # Straight out: daemon threads inside native code must not hold up the exit.
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def read_setup() -> ChildSetup:
    """Reads the set-up from `--config-fd N` to its end. A supervisor that died while writing ends this process."""
    parser = argparse.ArgumentParser(description="Started by `tokring serve`, not by hand.")
    parser.add_argument("--config-fd", type=int, required=True)
    with os.fdopen(parser.parse_args().config_fd, "rb") as pipe:
        data = pipe.read()
    if not data:
        sys.exit("tokring: the supervisor ended before it had handed over the configuration")
    return msgspec.json.decode(data, type=ChildSetup)


def become_child(setup: ChildSetup, supervisor: SupervisorLink) -> None:
    """Ties this process's life to the supervisor's and takes over signals and standard streams."""
    set_process_title(setup.name)
    die_with_parent(setup.supervisor_pid)
    # A terminal's Ctrl-C reaches the whole group and a service manager's SIGTERM every process: only the supervisor
    # decides when which of them ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: supervisor.send("terminate"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RELAYED_SIGNALS)  # blocked by the supervisor around the spawn
    os.set_blocking(1, False)
    os.set_blocking(2, False)
    sys.stdout = io.TextIOWrapper(LossyWriter(1), encoding="utf-8", errors="backslashreplace", write_through=True)
    sys.stderr = io.TextIOWrapper(LossyWriter(2), encoding="utf-8", errors="backslashreplace", write_through=True)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    configure_logging(setup.config.launch, setup.name)
    if setup.role == "frontend":
        ask_for_short_slices()


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent's spawning thread ends (prctl(2), PR_SET_PDEATHSIG)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the call above
        sys.exit("tokring: the parent is gone")


def configure_logging(settings: LaunchSettings, process: str) -> None:
    """Log lines on standard error; the supervisor puts the process's name in front, or it is in the JSON object."""
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    if settings.log_format == "json":
        logging.getLogger().handlers[0].setFormatter(JsonFormatter(process))
    logging.raiseExceptions = False
