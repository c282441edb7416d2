"""FinishRate: how fast requests finish, and so how soon a place should be free."""

import math

MAX_RETRY_AFTER_S = 60
_SMOOTHING = 0.2


class FinishRate:
    """Requests a second, smoothed over ticks."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._rate = 0.0
        self._num_finished = 0

    def tick(self, num_finished: int) -> None:
        """`num_finished`: requests so far, since the start."""
        now = (num_finished - self._num_finished) / self._tick_s
        self._rate += _SMOOTHING * (now - self._rate)
        self._num_finished = num_finished

    def retry_after_s(self, in_flight: int) -> int:
        """Seconds until a place should be free."""
        if self._rate <= 0:
            return 5
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(in_flight / self._rate / 4)))
