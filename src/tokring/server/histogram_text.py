"""HistogramText: the lines of one histogram in /metrics, prepared once; a scrape only fills in the numbers."""

from collections.abc import Sequence
from itertools import accumulate

from tokring.server.page_template import number_text


class HistogramText:
    """One name and one set of labels (`a="b",c="d"`, or empty); `bounds` may be the first few of those counted by."""

    def __init__(self, name: str, labels: str, bounds: Sequence[float]) -> None:
        comma = "," if labels else ""
        self._num_bounds = len(bounds)
        lines = [f'{name}_bucket{{{labels}{comma}le="{number_text(bound)}"}}' for bound in bounds]
        lines += [f'{name}_bucket{{{labels}{comma}le="+Inf"}}', f"{name}_sum{{{labels}}}", f"{name}_count{{{labels}}}"]
        # One `%` fills in all lines: a tenth of the time of as many f-strings.
        self._template = "".join(line.replace("%", "%%") + " %s\n" for line in lines)
        self._rendered: tuple[Sequence[int], str] = ((), "")

    def render(self, words: Sequence[int], scale: float) -> str:
        """`words`: the sum times `scale`, then observations per bucket, not cumulative, as in a stats page.

        Returns the lines of the last call if nothing was observed since.
        """
        if words != self._rendered[0]:
            counts = list(accumulate(words[1:]))
            values = (*counts[: self._num_bounds], counts[-1], number_text(words[0] / scale), counts[-1])
            self._rendered = (words, self._template % values)
        return self._rendered[1]
