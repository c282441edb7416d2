"""CheckpointError: the one exception of this package."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(Exception):
    """Model files that can't be used. `str(error)` is one line: the path, what was found, what was needed."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path = path
        self.reason = " ".join(reason.split())
        super().__init__(f"{path}: {self.reason}")
