"""SignalPipe: signals as bytes in a pipe that a selector waits for."""

import os
import signal
from collections.abc import Iterable
from types import FrameType


class SignalPipe:
    """The given signals do nothing but arrive here, from __enter__ to __exit__. Main thread only.

    Afterwards they are ignored: the process is about to exit, and a late one must not change its exit code.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._signals = tuple(signals)
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """For a selector."""
        return self._read_fd

    def receive(self) -> bytes:
        """The numbers of signals that have arrived; to be called when there are some."""
        return os.read(self._read_fd, 64)

    def __enter__(self) -> "SignalPipe":
        for number in self._signals:
            signal.signal(number, ignore_signal)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_IGN)
        os.close(self._read_fd)
        os.close(self._write_fd)


def ignore_signal(number: int, frame: FrameType | None) -> None:
    """The pipe tells the loop; the handler has nothing to do."""
