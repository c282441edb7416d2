"""Where the limits of this process's control groups are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal


def cgroup_directories(
    controller: Literal["cpu", "memory"], proc: Path, cgroup: Path
) -> Iterator[tuple[Path, Literal[1, 2]]]:
    """Every directory from our own group up to the root, of hierarchies that may limit us, with the cgroup version."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version: Literal[1, 2]
        if controllers == "":
            base, version = cgroup, 2
        elif controller in controllers.split(","):
            base, version = cgroup / controller, 1
        else:
            continue
        directory = base / path.lstrip("/")
        # In a container's own namespace the path may not exist; the root is then what limits us.
        for each in (directory, *directory.parents):
            if each == base or base in each.parents:
                yield each, version
