"""Target: one server under load; which processes it consists of, and holding it still while another is measured."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
LISTEN = "0A"  # a socket's state in /proc/net/tcp
LOOPBACK = "127.0.0.1"


class TargetError(Exception):
    """A server can't be used as asked for."""


@dataclass(frozen=True, slots=True)
class Target:
    """model: the name that requests carry."""

    name: str
    host: str
    port: int
    path: str
    model: str
    api_key: str | None = None

    @classmethod
    def parse(cls, text: str, model: str, api_key: str | None) -> Target:
        """NAME=URL, NAME=URL#MODEL or URL alone."""
        name, equals, url = text.partition("=")
        if not equals:
            name, url = "server", text
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise TargetError(f"{text!r}: a URL like http://127.0.0.1:8000 is needed (TLS is not measured)")
        host = LOOPBACK if parts.hostname == "localhost" else parts.hostname
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(name, host, parts.port or 80, path, parts.fragment or model, api_key)

    def with_listed_model(self) -> Target:
        """With the first model that the server lists, unless one is named. TargetError if it does not answer."""
        if self.model:
            return self
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        connection = HTTPConnection(self.host, self.port, timeout=10)
        try:
            connection.request("GET", f"{self.path}/v1/models", headers=headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise TargetError(f"{self.name} at {self.host}:{self.port} lists no models: status {answer.status}")
            model = json.loads(answer.read())["data"][0]["id"]
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise TargetError(f"{self.name} at {self.host}:{self.port} lists no models: {error!r}") from None
        finally:
            connection.close()
        return replace(self, model=str(model))

    def processes(self) -> list[int]:
        """Pids of the program that listens on this port, with all its relatives below the shell; [] if not local.

        A server's workers may be children of the listener, or the listener a child of theirs: the tree is taken from
        the topmost ancestor in the listener's process group that is no ancestor of this process.
        """
        listeners = _listening_pids(self.port) if self.host == LOOPBACK else set()
        parents = _parents()
        own = _ancestors(os.getpid(), parents)
        tops = {_topmost(pid, parents, own) for pid in listeners - own}
        return sorted(pid for pid in parents if _has_ancestor(pid, tops, parents))


def cpu_seconds(pids: Iterable[int]) -> dict[str, float]:
    """CPU time so far by process name; what has ended counts as nothing."""
    found: dict[str, float] = {}
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        title = _title(pid) or stat[stat.index("(") + 1 : stat.rindex(")")]
        fields = stat[stat.rindex(")") + 2 :].split()
        found[title] = found.get(title, 0.0) + (int(fields[11]) + int(fields[12])) * TICK_S
    return found


@contextmanager
def held(targets: Iterable[Target]) -> Iterator[None]:
    """Stops the processes of these servers by SIGSTOP, so that they take nothing from the one that is measured."""
    pids = [pid for target in targets for pid in target.processes()]
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _title(pid: int) -> str:
    """The program's name for itself, short: titles set by setproctitle are kept whole, command lines cut."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    first = words[0].decode(errors="replace").strip()
    return first if ":" in first else " ".join(Path(word.decode(errors="replace")).name for word in words[:3])[:40]


def _listening_pids(port: int) -> set[int]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return {pid for pid in _parents() if inodes & _sockets(pid)}


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            try:
                found.add(os.readlink(descriptor.path))
            except OSError:
                continue
    except OSError:
        pass
    return found


def _parents() -> dict[int, tuple[int, int]]:
    """pid → (parent, process group)."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue
            fields = stat[stat.rindex(")") + 2 :].split()
            found[int(entry.name)] = (int(fields[1]), int(fields[2]))
    return found


def _topmost(pid: int, parents: dict[int, tuple[int, int]], own: set[int]) -> int:
    while True:
        parent, group = parents[pid]
        if parent not in parents or parent in own or parents[parent][1] != group:
            return pid
        pid = parent


def _ancestors(pid: int, parents: dict[int, tuple[int, int]]) -> set[int]:
    """With the process itself."""
    found = set()
    while pid in parents:
        found.add(pid)
        pid = parents[pid][0]
    return found


def _has_ancestor(pid: int, tops: set[int], parents: dict[int, tuple[int, int]]) -> bool:
    while pid in parents:
        if pid in tops:
            return True
        pid = parents[pid][0]
    return False
