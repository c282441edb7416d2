"""What is known of a dead engine's last step."""

import os

import numpy as np

from tokring.step_rows import RequestAtDeath, StepRows, create, read_at_death

# By COLUMNS: front end, stream slot, slot generation, scheduled tokens, cached tokens.
TABLE = np.array([(0, 5, 1, 1, 16), (1, 5, 3, 1, 0), (0, 9, -1, 0, 32)], np.int32)


def written(num_rows: int, max_rows: int = 8, writer_rows: int = 4) -> tuple[int, StepRows]:
    fd = create(max_rows)
    rows = StepRows(writer_rows, fd)
    rows.begin(TABLE.T.copy(), num_rows)
    return fd, rows


def test_each_front_end_finds_its_requests_and_whether_the_step_computed_them() -> None:
    fd, _ = written(3)
    assert read_at_death(fd, 0) == [RequestAtDeath(5, 1, True, 16), RequestAtDeath(9, 2**32 - 1, False, 32)]
    assert read_at_death(fd, 1) == [RequestAtDeath(5, 3, True, 0)]
    os.close(fd)


def test_between_two_steps_nothing_is_being_computed() -> None:
    fd, rows = written(2)
    rows.end()
    assert read_at_death(fd, 0) == [RequestAtDeath(5, 1, False, 16)]
    os.close(fd)


def test_an_engine_that_never_made_a_step_leaves_an_empty_table() -> None:
    fd = create(4)
    assert read_at_death(fd, 0) == []
    os.close(fd)
