"""When a process that died is followed by another."""

from tokring.launch.restart_policy import MAX_BACK_OFF_S, RestartPolicy


def test_after_progress_the_next_one_starts_at_once_however_often() -> None:
    policy = RestartPolicy(1)
    assert [policy.back_off_s(made_progress=True) for _ in range(5)] == [0.0] * 5


def test_deaths_without_progress_wait_twice_as_long_each_and_are_limited() -> None:
    policy = RestartPolicy(3)
    assert [policy.back_off_s(made_progress=False) for _ in range(4)] == [0.1, 0.2, 0.4, None]
    policy = RestartPolicy(100)
    assert [policy.back_off_s(made_progress=False) for _ in range(100)][-1] == MAX_BACK_OFF_S


def test_progress_forgives_earlier_deaths() -> None:
    policy = RestartPolicy(1)
    assert policy.back_off_s(made_progress=False) == 0.1
    assert policy.back_off_s(made_progress=True) == 0.0
    assert policy.back_off_s(made_progress=False) == 0.1


def test_no_restarts_means_none_even_after_progress() -> None:
    assert RestartPolicy(0).back_off_s(made_progress=True) is None
