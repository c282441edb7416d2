"""Who gets a shared core first: front ends wake up at once, the engine's computing threads give way.

On cores that both share, a front end's wake-up beside computing threads took 3.8 ms (p90); with a short time slice for
the front end and nice +10 for the engine it takes 27 µs. Neither needs a privilege. Kernels that do not know slices
(before Linux 6.12) ignore the request.
"""

import contextlib
import ctypes
import os
import platform
import struct

SHORT_SLICE_NS = 100_000  # the shortest that the kernel takes
LONG_SLICE_NS = 100_000_000  # the longest: who wakes up with a shorter one does not wait until it is over
ENGINE_NICE = 10
SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # struct sched_attr, version 0; see sched_setattr(2)
SCHED_OTHER = 0


def ask_for_short_slices() -> bool:
    """For this thread and all that it starts. False if the kernel refuses."""
    return _ask_for_slices(SHORT_SLICE_NS)


def give_way() -> None:
    """Raises this thread's nice value, and that of all threads that it starts, to at least ENGINE_NICE."""
    if os.getpriority(os.PRIO_PROCESS, 0) < ENGINE_NICE:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, ENGINE_NICE)


def ask_for_long_slices() -> bool:
    """For work beside the engine's steps: its share of a core stays, but who wakes up there is not kept waiting."""
    return _ask_for_slices(LONG_SLICE_NS)


def _ask_for_slices(slice_ns: int) -> bool:
    number = SYS_SCHED_SETATTR.get(platform.machine())
    if number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = SCHED_ATTR.pack(SCHED_ATTR.size, SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
