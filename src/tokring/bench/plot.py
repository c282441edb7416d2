"""svg_plot, svg_lines: lines on logarithmic axes as SVG text. No plotting library for two figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Row = dict[str, Any]
Point = tuple[float, float]

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 64, 250, 44, 52
# transport, delivery, waiting, regime: colour, dashed
LINES = {
    ("msgpack+zmq", "L2", "uvloop", "closed"): ("#b02a37", False),
    ("pickle+zmq", "L2", "blocking", "closed"): ("#d9822b", False),
    ("mp.Queue", "L2", "blocking", "closed"): ("#a08a2c", False),
    ("mp.Pipe", "L2", "blocking", "closed"): ("#7a7a2e", False),
    ("unix+orjson", "L2", "blocking", "closed"): ("#8c5fa8", False),
    ("iceoryx2", "L1", "blocking", "closed"): ("#4d7c8a", False),
    ("seqpacket", "L1", "uvloop", "closed"): ("#3f7fbf", False),
    ("ring", "L2", "uvloop", "closed"): ("#58a55c", False),
    ("ring", "L1", "uvloop", "closed"): ("#14752c", False),
    ("doorbell alone", "L0", "uvloop", "closed"): ("#555555", True),
    ("ring", "L0", "polling", "hot"): ("#14752c", False),
    ("memcpy", "L0", "polling", "hot"): ("#555555", True),
}

COLOURS = ("#14752c", "#b02a37", "#3f7fbf", "#d9822b", "#8c5fa8")


def svg_plot(rows: Sequence[Row], machine: dict[str, Any], logprobs: int = 0) -> str:
    """One-way cost of a step against batch size. ValueError without rows."""
    lines = _lines(rows, logprobs)
    title = "One engine step to one front end, one-way p50" + (f", top-{logprobs} logprobs" if logprobs else "")
    subtitle = f"{machine['cpu']}, {machine['date'][:10]}; asleep in its way of waiting unless polling"
    drawn = [
        Line(f"{key[0]} ({key[1]}, {key[2]})", points, *LINES[key], width=2.5 if key[0] == "ring" else 1.5)
        for key, points in lines.items()
    ]
    return _svg(drawn, title, subtitle, "running requests in the step", "µs")


def svg_lines(lines: dict[str, list[Point]], title: str, subtitle: str, x_label: str, unit: str) -> str:
    """A line per name, the first one thick. ValueError without points."""
    drawn = [
        Line(name, sorted(points), COLOURS[i % len(COLOURS)], False, width=1.5 if i else 2.5)
        for i, (name, points) in enumerate(lines.items())
    ]
    drawn.sort(key=lambda line: -line.points[-1][1])  # labels are laid out from the top down
    return _svg(drawn, title, subtitle, x_label, unit)


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: list[Point]
    colour: str
    is_dashed: bool
    width: float


def _svg(lines: Sequence[Line], title: str, subtitle: str, x_label: str, unit: str) -> str:
    points = [point for line in lines for point in line.points]
    if not points:
        raise ValueError("no rows to plot")
    axes = Axes(points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        '     font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="15">{escape(title)}</text>',
        f'<text x="{LEFT}" y="34" fill="#666">{escape(subtitle)}</text>',
        *axes.grid(x_label, unit),
    ]
    for line, label_y in zip(lines, _label_heights(lines, axes), strict=True):
        parts += _drawn(line, axes, label_y)
    return "\n".join([*parts, "</svg>", ""])


class Axes:
    """Logarithmic both ways."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._batches = sorted({batch for batch, _ in points})
        self._x = (math.log(min(self._batches)), math.log(max(self._batches)))
        costs = [cost for _, cost in points]
        self._y = (math.floor(math.log10(min(costs))), math.ceil(math.log10(max(costs))))

    def x(self, batch: float) -> float:
        low, high = self._x
        return LEFT + (math.log(batch) - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, cost: float) -> float:
        low, high = self._y
        return HEIGHT - BOTTOM - (math.log10(cost) - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)

    def grid(self, x_label: str, unit: str) -> list[str]:
        parts = []
        for power in range(self._y[0], self._y[1] + 1):
            y = self.y(10.0**power)
            parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} {unit}</text>')
        for batch in self._batches:
            x = self.x(batch)
            parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>')
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{batch:g}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
        return parts


def _lines(rows: Sequence[Row], logprobs: int) -> dict[tuple[str, str, str, str], list[Point]]:
    found: dict[tuple[str, str, str, str], list[Point]] = {}
    for row in rows:
        key = (row["transport"], row["delivery"], row["waiting"], row["regime"])
        if key in LINES and row["logprobs"] == logprobs and "batch" in row:
            found.setdefault(key, []).append((row["batch"], row["p50_us"]))
    return {key: sorted(found[key]) for key in sorted(found, key=lambda key: -max(found[key])[1])}


def _label_heights(lines: Sequence[Line], axes: Axes) -> list[float]:
    """Labels at the lines' right ends, from the top down, pushed apart where they would overlap."""
    heights: list[float] = []
    for line in lines:
        wanted = axes.y(line.points[-1][1]) + 4
        heights.append(max(wanted, heights[-1] + 15) if heights else wanted)
    return heights


def _drawn(line: Line, axes: Axes, label_y: float) -> list[str]:
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in line.points)
    dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    return [
        f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="{line.width}"{dash}/>',
        f'<text x="{WIDTH - RIGHT + 8}" y="{label_y:.1f}" fill="{line.colour}">{escape(line.label)}</text>',
    ]
