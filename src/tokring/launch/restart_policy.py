"""RestartPolicy: whether and when a process that died is followed by another."""

MIN_BACK_OFF_S = 0.1  # after a death without progress; doubled by each one more in a row
MAX_BACK_OFF_S = 10.0


class RestartPolicy:
    """For one place (a role and index) over all processes that hold it one after the other."""

    def __init__(self, num_restarts: int) -> None:
        """`num_restarts`: deaths in a row without progress that are followed by a restart; 0: no death is."""
        self._num_restarts = num_restarts
        self._num_deaths = 0  # in a row, without progress between them

    def back_off_s(self, *, made_progress: bool) -> float | None:
        """After a death: seconds until the next one is to start, 0 after progress; None: there is no next one."""
        self._num_deaths = 0 if made_progress else self._num_deaths + 1
        if max(self._num_deaths, 1) > self._num_restarts:
            return None
        if not self._num_deaths:
            return 0.0
        return min(MIN_BACK_OFF_S * 2.0 ** (self._num_deaths - 1), MAX_BACK_OFF_S)
