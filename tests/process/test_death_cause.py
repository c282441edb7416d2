"""Whose fault a death is: a request's, or somebody's who kills."""

import signal
from pathlib import Path

import pytest

from tokring.launch.death_cause import VMSTAT, OomKills, is_own_fault


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "memory.events"
    path.write_text("low 0\noom 1\noom_kill 1\n")
    return path


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
    counter: Path, exit_code: int, was_hung: bool, expected: bool
) -> None:
    assert is_own_fault(exit_code, was_hung=was_hung, oom_kills=OomKills(counter)) is expected


def test_a_kill_because_memory_was_short_is_a_fault_and_older_ones_are_none(counter: Path) -> None:
    kills = OomKills(counter)
    counter.write_text("oom_kill 2\n")
    kills.look()  # the look between the kill and the news of it
    assert is_own_fault(-signal.SIGKILL, was_hung=False, oom_kills=kills)
    assert not is_own_fault(-signal.SIGTERM, was_hung=False, oom_kills=kills)
    kills.look()
    assert not is_own_fault(-signal.SIGKILL, was_hung=False, oom_kills=kills)


def test_where_the_kernel_does_not_tell_a_kill_counts(tmp_path: Path) -> None:
    assert OomKills(tmp_path / "none").have_happened()
    (tmp_path / "odd").write_text("oom_kill many\n")
    assert OomKills(tmp_path / "odd").have_happened()


@pytest.mark.skipif(not VMSTAT.is_file(), reason="no /proc/vmstat")
def test_the_kernels_own_counter_is_read() -> None:
    assert OomKills(VMSTAT)._read() is not None
    assert OomKills()._read() is not None
