"""What is measured: a payload, the way it is delivered, and the rhythm in which it is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Delivery(StrEnum):
    """What the reader holds when the clock stops. Only equal levels compare, unless a ratio says so in its label."""

    BYTES = "L0"  # every byte was read by native code
    COLUMNS = "L1"  # numpy views of columns, nothing copied
    OBJECTS = "L2"  # one Python object per request


class Waiting(StrEnum):
    """How the reader waits for the next step."""

    POLLING = "polling"
    BLOCKING = "blocking"  # in the transport's own blocking call
    UVLOOP = "uvloop"  # in an event loop, as a front end does


class Direction(StrEnum):
    STEP = "step"  # engine -> front end
    REQUEST = "request"  # front end -> engine


@dataclass(frozen=True, slots=True)
class Case:
    """One payload: a step of `size` requests with `num_logprobs` each, or one request of `size` prompt ids."""

    direction: Direction
    size: int
    num_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Regime:
    """The rhythm. closed: the next step is sent after the reader's acknowledgement and `settle_ns` more.

    `settle_ns` is there for the reader to fall asleep, or for prefetched cache lines to arrive. `sleep_ns`: the writer
    sleeps so long before each step (the whole machine rests, cores may halt).
    """

    name: str
    closed: bool = True
    settle_ns: int = 0
    sleep_ns: int = 0

    def warm_up(self) -> Regime:
        return replace(self, sleep_ns=min(self.sleep_ns, PACED_1MS.sleep_ns))


HOT = Regime("hot", settle_ns=5_000)
CLOSED = Regime("closed", settle_ns=10_000)
# The next step right after the acknowledgement: now and then before the reader is asleep, so less is owed to waking.
AT_ONCE = Regime("at once")
PACED_1MS = Regime("paced1ms", sleep_ns=1_000_000)
PACED_10MS = Regime("paced10ms", sleep_ns=10_000_000)
SATURATED = Regime("saturated", closed=False)


def idle(seconds: float) -> Regime:
    """Nothing is sent for `seconds`: what does waiting cost?"""
    return Regime("idle", sleep_ns=int(seconds * 1e9))
