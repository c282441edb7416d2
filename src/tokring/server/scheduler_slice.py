"""A short scheduler slice: on shared cores the front end runs soon after a doorbell, not after a busy engine's turn."""

import ctypes
import logging
import os
import platform

logger = logging.getLogger(__name__)

SLICE_NS = 100_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


class _SchedAttr(ctypes.Structure):
    """struct sched_attr of sched_setattr(2), as far as its first version goes."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("sched_policy", ctypes.c_uint32),
        ("sched_flags", ctypes.c_uint64),
        ("sched_nice", ctypes.c_int32),
        ("sched_priority", ctypes.c_uint32),
        ("sched_runtime", ctypes.c_uint64),
        ("sched_deadline", ctypes.c_uint64),
        ("sched_period", ctypes.c_uint64),
    ]


def ask_for_short_slices() -> bool:
    """Asks the kernel (6.12 or later) for SLICE_NS; unprivileged, and no harm if it is refused: then False."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return False
    attributes = _SchedAttr(size=ctypes.sizeof(_SchedAttr), sched_nice=os.getpriority(os.PRIO_PROCESS, 0))
    attributes.sched_runtime = SLICE_NS  # for SCHED_OTHER this is the slice
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, ctypes.byref(attributes), 0) != 0:
        logger.debug("sched_setattr: %s", os.strerror(ctypes.get_errno()))
        return False
    return True
