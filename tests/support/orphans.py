"""Processes whose parent has ended: found, as they become children of the test's own process (Linux's subreaper)."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

import psutil

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@contextlib.contextmanager
def finding_orphans() -> Iterator[Callable[[], list[psutil.Process]]]:
    """What it yields lists those that live, of all processes started within the block, in whatever depth."""
    before = set(psutil.Process().children())
    set_subreaper(True)
    try:
        yield lambda: [child for child in set(psutil.Process().children()) - before if lives(child)]
    finally:
        set_subreaper(False)


def lives(process: psutil.Process) -> bool:
    """One that has ended is reaped."""
    with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
        os.waitpid(process.pid, os.WNOHANG)
    return False


def set_subreaper(is_one: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(is_one), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
