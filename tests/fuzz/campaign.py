"""One fuzz target after the other case, each from a seed of its own, so that a finding can be repeated."""

from __future__ import annotations

import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import FrameType

CASE_LIMIT_S = 60  # of one case: only what never ends takes so long, on whatever machine
Case = Callable[[random.Random], str]  # returns how it went, for the statistics; raises on a finding


class Finding(AssertionError):
    """A case went wrong; the message names its seed."""


def campaign(
    case: Case, *, seed: int, num_cases: int | None = None, seconds: float | None = None, limit_s: int = CASE_LIMIT_S
) -> Counter[str]:
    """Runs cases until their number or the time is up; returns how often each outcome came. Raises Finding."""
    outcomes: Counter[str] = Counter()
    end = time.monotonic() + (seconds if seconds is not None else 1e9)
    old = signal.signal(signal.SIGALRM, _on_alarm)
    try:
        while sum(outcomes.values()) != num_cases and time.monotonic() < end:
            case_seed = seed * 1_000_003 + sum(outcomes.values())
            signal.alarm(limit_s)
            try:
                outcomes[case(random.Random(case_seed))] += 1
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a panic of a Rust library is no Exception
                raise Finding(f"case {case_seed}: {error!r}") from error
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, old)
    return outcomes


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the case does not end")


def main(case: Case) -> int:
    """`python -m tests.fuzz.NAME SECONDS [SEED]`, or with one case again: `… case CASE_SEED`."""
    if sys.argv[1] == "case":
        print(case(random.Random(int(sys.argv[2]))))
        return 0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time())
    try:
        outcomes = campaign(case, seed=seed, seconds=float(sys.argv[1]))
    except Finding:
        traceback.print_exc()
        return 1
    print(f"{sum(outcomes.values())} cases from seed {seed}: {dict(outcomes.most_common(8))}")
    return 0


def bend(data: bytes, rng: random.Random) -> bytes:
    """`data` with some bytes, numbers or stretches changed, or its end cut off."""
    bent = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        if not bent:
            break
        at = rng.randrange(len(bent))
        match rng.randrange(6):
            case 0:
                bent[at] = rng.randrange(256)
            case 1:
                bent[at] ^= 1 << rng.randrange(8)
            case 2:  # a count or an offset
                number = rng.choice(
                    [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, rng.randrange(2**16)]
                )
                bent[at : at + 8] = number.to_bytes(8, "little")
            case 3:
                del bent[at : at + rng.randint(1, 64)]
            case 4:
                bent[at:at] = bent[at : at + rng.randint(1, 64)]
            case 5 if rng.random() < 0.3:
                del bent[at:]
    return bytes(bent)
