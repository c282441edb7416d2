"""Runs spin over ring.pml: every sound configuration must hold, every mutant must fail.

    python ipc/model/check.py [--long]

Needs the Debian package spin and a C compiler. Prints a line a configuration; exit status 1 if one is not as it should.
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).with_name("ring.pml")
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One set of defines; `holds` says whether the model must be free of errors under it."""

    defines: tuple[str, ...]
    holds: bool
    long: bool = False


ONE_RING_CRASH = ("CRASH", "NRINGS=1")
CONFIGURATIONS = (
    Configuration(defines=(), holds=True),
    Configuration(defines=("CCRASH",), holds=True),
    Configuration(defines=(*ONE_RING_CRASH, "FRAMES=3", "CAPACITY=2"), holds=True),
    Configuration(defines=("CRASH", "FRAMES=1"), holds=True, long=True),
    Configuration(defines=("NO_STORELOAD",), holds=False),
    Configuration(defines=("RELAXED_PUBLISH",), holds=False),
    Configuration(defines=("NO_RECHECK",), holds=False),
    Configuration(defines=("NO_READ_RELEASE",), holds=False),
    Configuration(defines=(*ONE_RING_CRASH, "NO_ATTACH_BELL"), holds=False),
    Configuration(defines=(*ONE_RING_CRASH, "PRIVATE_RESTART"), holds=False),
    Configuration(defines=(*ONE_RING_CRASH, "CLOSE_UNDRAINED"), holds=False),
)


def errors_found(configuration: Configuration) -> tuple[int, int]:
    """(errors, states stored) of one exhaustive search. Raises CalledProcessError if spin or the compiler fails."""
    with tempfile.TemporaryDirectory() as folder:
        defines = [f"-D{define}" for define in configuration.defines]
        run = {"cwd": folder, "check": True, "capture_output": True, "text": True, "timeout": TIMEOUT_S}
        subprocess.run(["spin", "-a", *defines, str(MODEL)], **run)  # type: ignore[call-overload]
        compile_command = ["cc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=2048", "-o", "pan", "pan.c"]
        subprocess.run(compile_command, **run)  # type: ignore[call-overload]
        report = subprocess.run(["./pan", "-m100000"], **run).stdout  # type: ignore[call-overload]
    if "max search depth too small" in report or "memory limit" in report:
        raise RuntimeError(f"the search was cut short:\n{report}")
    errors, states = re.search(r"errors: (\d+)", report), re.search(r"(\d+) states, stored", report)
    assert errors is not None and states is not None, report
    return int(errors[1]), int(states[1])


def as_it_must_be(configuration: Configuration) -> bool:
    errors, states = errors_found(configuration)
    right = (errors == 0) == configuration.holds
    expected = "must hold" if configuration.holds else "must fail"
    verdict = "ok" if right else "WRONG"
    print(
        f"{verdict:5} {' '.join(configuration.defines) or 'no crash':40} {expected}: {errors} errors, {states} states",
        flush=True,
    )
    return right


def main() -> int:
    long = "--long" in sys.argv[1:]
    results = [as_it_must_be(configuration) for configuration in CONFIGURATIONS if long or not configuration.long]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
