"""ServiceManager: tells a service manager (systemd, Type=notify or notify-reload) how we are, see sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

SEND_TIMEOUT_S = 1.0


class ServiceManager:
    """Sends datagrams to $NOTIFY_SOCKET; without it every call does nothing. Never fails.

    What can't be said again waits for room in the manager's socket, SEND_TIMEOUT_S at most.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        if self._address.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.watchdog_s = _watchdog_s(environment) if self._socket is not None else None
        self._watchdog_due = time.monotonic()

    def starting(self, status: str, timeout_s: float) -> None:
        """The start may take that long, whatever the unit's own limit is."""
        self._send(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(timeout_s * 1e6)}")

    def ready(self, status: str) -> None:
        """The server answers; also said at the end of a reload, whether it succeeded or not."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Until ready() is said again."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=replacing front ends")

    def stopping(self, status: str, timeout_s: float) -> None:
        """The end has begun and may take that long."""
        self._send("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(timeout_s * 1e6)}")

    @property
    def due(self) -> float | None:
        """When alive() is to be called next, in time.monotonic(); None: never."""
        return None if self.watchdog_s is None else self._watchdog_due

    def alive(self, now: float) -> None:
        """To be called whenever the supervisor's loop comes round: feeds the watchdog twice per interval."""
        if self.watchdog_s is not None and now >= self._watchdog_due:
            self._watchdog_due = now + self.watchdog_s / 2
            self._send("WATCHDOG=1", timeout_s=0.0)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str, timeout_s: float = SEND_TIMEOUT_S) -> None:
        if self._socket is not None:
            self._socket.settimeout(timeout_s)
            address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
            with contextlib.suppress(OSError):  # nobody listens, or not now
                self._socket.sendto("\n".join(lines).encode(), address)


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """WatchdogSec= of the unit, if it is for this process."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        interval_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6
    except ValueError:
        return None
    return interval_s if interval_s > 0 else None
