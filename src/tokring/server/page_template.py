"""PageTemplate: a text with places for numbers of the stats pages, which one formatting operation fills in."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tokring_ipc.stats import STAT_INDEX, STATS_TABLE


def number_text(value: float) -> str:
    """Shortest text of a number; whole numbers without exponent."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


class PageTemplate:
    """Build it by line(), count(), histogram() and late(); then render() as often as wanted.

    Every whole number in it is the sum of a range of words: one word of a counter, or a histogram's buckets up to a
    bound. So all of them are differences of one running sum over the page.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._first: list[int] = []  # by place, the first word that counts in it
        self._stop: list[int] = []  # and the one behind the last
        self._sums: list[tuple[int, int, float]] = []  # (place, word, scale): numbers with a fraction
        self._late: list[tuple[int, str]] = []  # (place, name of a text that each rendering brings)
        self._text = ""
        self._ranges: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]] | None = None

    def line(self, text: str) -> None:
        """A line without numbers."""
        self._parts.append(text.replace("%", "%%") + "\n")

    def head(self, name: str, kind: str, text: str) -> None:
        """HELP and TYPE."""
        self.line(f"# HELP {name} {text}\n# TYPE {name} {kind}")

    def count(self, series: str, stat: str, instance: int = 0) -> None:
        """A line with a counter or gauge."""
        word = STATS_TABLE[STAT_INDEX[stat]].first_word + instance
        self._number(series, word, word + 1)

    def histogram(self, name: str, stat: str, labels: str, instance: int = 0, limit: float | None = None) -> None:
        """The lines of one histogram; bounds above `limit` are left out."""
        row = STATS_TABLE[STAT_INDEX[stat]]
        total = row.first_word + instance * row.words
        comma = "," if labels else ""
        for number, bound in enumerate(row.bounds):
            if limit is None or bound <= limit:
                series = f'{name}_bucket{{{labels}{comma}le="{number_text(bound)}"}}'
                self._number(series, total + 1, total + 2 + number)
        stop = total + row.words
        self._number(f'{name}_bucket{{{labels}{comma}le="+Inf"}}', total + 1, stop)
        self._sums.append((len(self._first), total, row.scale))
        self._number(f"{name}_sum{{{labels}}}", total, total + 1)
        self._number(f"{name}_count{{{labels}}}", total + 1, stop)

    def late(self, series: str, name: str) -> None:
        """A line with a text that render() is given under this name."""
        self._late.append((len(self._first), name))
        self._number(series, 0, 0)

    def late_lines(self, name: str) -> None:
        """Whole lines, each with its end, that render() is given under this name."""
        self._late.append((len(self._first), name))
        self._place("%s", 0, 0)

    def render(self, words: npt.NDArray[np.uint64], late: Mapping[str, str]) -> str:
        """`words`: one page's, or the sums over several."""
        if self._ranges is None:
            self._text = "".join(self._parts)
            self._ranges = np.array(self._first, np.intp), np.array(self._stop, np.intp)
        running = np.zeros(len(words) + 1, np.uint64)
        np.cumsum(words, out=running[1:])
        first, stop = self._ranges
        values: list[int | str] = (running[stop] - running[first]).tolist()
        for place, word, scale in self._sums:
            values[place] = number_text(int(words[word]) / scale)
        for place, name in self._late:
            values[place] = late[name]
        return self._text % tuple(values)

    def _number(self, series: str, first: int, stop: int) -> None:
        self._place(series.replace("%", "%%") + " %s\n", first, stop)

    def _place(self, part: str, first: int, stop: int) -> None:
        self._parts.append(part)
        self._first.append(first)
        self._stop.append(stop)


def any_in_each(words: npt.NDArray[np.uint64], stat: str) -> npt.NDArray[np.bool_]:
    """Of a counter or histogram with several instances: which of them have counted anything."""
    row = STATS_TABLE[STAT_INDEX[stat]]
    values = words[row.first_word : row.first_word + row.instances * row.words]
    seen: npt.NDArray[np.bool_] = np.any(values.reshape(row.instances, row.words), axis=1)
    return seen
