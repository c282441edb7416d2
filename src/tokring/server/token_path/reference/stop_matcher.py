"""StopMatcher: finds stop strings across token borders and holds back exactly what may still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Text in, text out, delayed by no more than the longest suffix that is a proper prefix of a stop string."""

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool) -> str:
        """The text that is safe to show. Sets `matched` on the first complete match; unarmed, matches don't count."""
        buffer = self._held + text
        if armed:
            for end in range(len(self._held) + 1, len(buffer) + 1):
                for stop in self._stops:
                    if buffer.endswith(stop, 0, end):
                        self.matched, self._held = stop, ""
                        return buffer[: end if self._include_stop else end - len(stop)]
        safe = len(buffer) - self._num_held(buffer)
        self._held = buffer[safe:]
        return buffer[:safe]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_held(self, buffer: str) -> int:
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(buffer)), 0, -1):
            if any(len(stop) > length and stop.startswith(buffer[-length:]) for stop in self._stops):
                return length
        return 0
