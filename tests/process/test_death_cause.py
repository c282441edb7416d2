"""Whose fault a death is: a request's, or somebody's who kills."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.test_failing_starts import descriptors_up_to
from tokring.launch.death_cause import VMSTAT, OomKills, is_own_fault

KillsOf = Callable[..., OomKills]  # kills_of(path): closed at the end of the test


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "memory.events"
    path.write_text("low 0\noom 1\noom_kill 1\n")
    return path


@pytest.fixture
def kills_of() -> Iterator[KillsOf]:
    with contextlib.ExitStack() as stack:
        yield lambda path=None: stack.enter_context(contextlib.closing(OomKills(path)))


@pytest.mark.parametrize(
    ("exit_code", "was_hung", "expected"),
    [
        (1, False, True),
        (0, False, True),
        (-signal.SIGSEGV, False, True),
        (-signal.SIGABRT, False, True),
        (-signal.SIGBUS, False, True),
        (-signal.SIGKILL, False, False),
        (-signal.SIGTERM, False, False),
        (-signal.SIGKILL, True, True),
    ],
)
def test_a_signal_that_only_others_send_is_no_fault(
    kills_of: KillsOf, counter: Path, exit_code: int, was_hung: bool, expected: bool
) -> None:
    assert is_own_fault(exit_code, was_hung=was_hung, oom_kills=kills_of(counter)) is expected


def test_a_kill_because_memory_was_short_is_a_fault_and_older_ones_are_none(kills_of: KillsOf, counter: Path) -> None:
    kills = kills_of(counter)
    counter.write_text("oom_kill 2\n")
    kills.look()  # the look between the kill and the news of it
    assert is_own_fault(-signal.SIGKILL, was_hung=False, oom_kills=kills)
    assert not is_own_fault(-signal.SIGTERM, was_hung=False, oom_kills=kills)
    kills.look()
    assert not is_own_fault(-signal.SIGKILL, was_hung=False, oom_kills=kills)


def test_the_counter_is_read_also_when_there_is_no_descriptor_left(kills_of: KillsOf, counter: Path) -> None:
    kills = kills_of(counter)
    with descriptors_up_to(0):
        assert not kills.have_happened()
    counter.write_text("oom_kill 2\n")
    with descriptors_up_to(0):
        assert kills.have_happened()


def test_where_the_kernel_does_not_tell_a_kill_counts(kills_of: KillsOf, tmp_path: Path) -> None:
    assert kills_of(tmp_path / "none").have_happened()
    (tmp_path / "odd").write_text("oom_kill many\n")
    assert kills_of(tmp_path / "odd").have_happened()


@pytest.mark.skipif(not VMSTAT.is_file(), reason="no /proc/vmstat")
def test_the_kernels_own_counter_is_read(kills_of: KillsOf) -> None:
    assert kills_of(VMSTAT)._read() is not None
    assert kills_of()._read() is not None
