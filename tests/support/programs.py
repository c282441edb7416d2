"""Debian programs that tests drive: missing ones skip on a user's machine and fail in CI."""

import os
import shutil

import pytest


def require_program(name: str, package: str | None = None) -> str:
    """Path of a program; `package` is what brings it where that has another name."""
    path = shutil.which(name)
    if path is not None:
        return path
    message = f"{name} is not installed: apt-get install {package or name}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
