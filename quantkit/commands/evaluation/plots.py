"""Plots of a report as inline SVG: no script, no font, no file of its own; colours come from the page's variables.

Every plot has a title and a description for those who do not see it, and series differ by mark as well as by colour.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 16, 52
MARKS = ("circle", "square", "diamond", "triangle")
COLOURS = 6


@dataclass(frozen=True, slots=True)
class Point:
    """One mark: `low` and `high` are the ends of its interval, where it has one."""

    label: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to a place between `start` and `end`, in SVG units; logarithmic where asked for."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool = False) -> "Axis":
        """With some room on both sides."""
        low, high = min(values), max(values)
        if log:
            low, high = math.log10(low), math.log10(high)
        room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(low - room, high + room, start, end, log)

    def place(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        return self.start + (at - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside the axis; at least two of them even where a logarithmic one spans no decade."""
        if not self.log:
            return _round_values(self.low, self.high)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        steps = (1, 2, 5) if self.high - self.low < 2.5 else (1,)
        values = [step * 10.0**decade for decade in decades for step in steps]
        inside = [value for value in values if self.low <= math.log10(value) <= self.high]
        return inside if len(inside) > 1 else _round_values(10.0**self.low, 10.0**self.high)


def _round_values(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 by a power of ten, at most seven."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    first = math.ceil(low / step)
    return [step * at for at in range(first, math.floor(high / step) + 1)]


def scatter(
    name: str, title: str, x: str, y: str, points: Sequence[Point], *, log: bool, level: tuple[str, float] | None = None
) -> str:
    """Points with their Pareto front: those that no other beats in both. `level` is a dashed line with its name."""
    values = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    if level is not None:
        values.append(level[1])
    if log:
        values = [value for value in values if value > 0]
    across = Axis.over([point.x for point in points], LEFT, WIDTH - RIGHT)
    up = Axis.over(values, HEIGHT - BOTTOM, TOP, log=log)
    parts = [_frame(across, up, x, y)]
    front = pareto(points)
    path = " ".join(f"{across.place(point.x):.1f},{up.place(point.y):.1f}" for point in front)
    parts.append(f'<polyline class="front" points="{path}"/>')
    if level is not None:
        place = up.place(level[1])
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text x="{LEFT + 6}" y="{place - 6:.1f}">{escape(level[0])}</text>')
    for index, point in enumerate(points):
        left, top = across.place(point.x), up.place(point.y)
        if point.low is not None and point.high is not None and (not log or point.low > 0):
            low, high = up.place(point.low), up.place(point.high)
            parts.append(
                f'<line class="s{index % COLOURS}" x1="{left:.1f}" x2="{left:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            )
        parts.append(_mark(index, left, top))
        end = left > WIDTH - 200
        parts.append(
            f'<text x="{left + (-10 if end else 10):.1f}" y="{top - 9:.1f}" text-anchor="{"end" if end else "start"}">'
            f"{escape(point.label)}</text>"
        )
    words = "; ".join(f"{point.label}: {point.x:.3g} bits, {point.y:.4g}" for point in points)
    return _svg(
        name, title, f"{y} against {x}. {words}. On the Pareto front: {', '.join(one.label for one in front)}.", parts
    )


def pareto(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats with fewer bits and a lower value, by rising bits."""
    front: list[Point] = []
    for point in sorted(points, key=lambda one: (one.x, one.y)):
        if not front or point.y < front[-1].y:
            front.append(point)
    return front


def lines(name: str, title: str, x: str, y: str, series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """One line for each series over 0, 1, 2, …"""
    values = [max(value, 1e-12) for _, row in series for value in row]
    across = Axis.over([0, max(len(row) for _, row in series) - 1], LEFT, WIDTH - RIGHT)
    up = Axis.over(values, HEIGHT - BOTTOM, TOP, log=True)
    parts = [_frame(across, up, x, y, whole=True)]
    for index, (label, row) in enumerate(series):
        places = [(across.place(at), up.place(max(value, 1e-12))) for at, value in enumerate(row)]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        parts.append(f'<polyline class="s{index % COLOURS} line" points="{path}"/>')
        parts += [_mark(index, *place, size=3.0) for place in places]
        parts.append(_mark(index, LEFT + 16, TOP + 14 + 20 * index))
        parts.append(f'<text x="{LEFT + 28}" y="{TOP + 18 + 20 * index}">{escape(label)}</text>')
    words = "; ".join(f"{label}: from {row[0]:.3g} to {row[-1]:.3g}, at most {max(row):.3g}" for label, row in series)
    return _svg(name, title, f"{y} against {x}. {words}.", parts)


def heat_map(
    name: str, title: str, unit: str, rows: Sequence[str], cells: Sequence[Sequence[float | None]], *, log: bool = False
) -> str:
    """A row for each of `rows`, a column for each block; darker is more. None is an empty cell."""
    known = [value for row in cells for value in row if value is not None and (value > 0 or not log)]
    scale = (lambda value: math.log10(value)) if log else (lambda value: value)
    low, high = (scale(min(known)), scale(max(known))) if known else (0.0, 1.0)
    columns = max(len(row) for row in cells)
    left, height = 110, 26
    width = (WIDTH - left - RIGHT) / columns
    parts = []
    for at, (label, row) in enumerate(zip(rows, cells, strict=True)):
        top = TOP + at * height
        parts.append(f'<text x="{left - 8}" y="{top + 17}" text-anchor="end">{escape(label)}</text>')
        for column, value in enumerate(row):
            if value is None or (log and value <= 0):
                continue
            share = (scale(value) - low) / (high - low) if high > low else 0.5
            parts.append(
                f'<rect class="cell" x="{left + column * width:.1f}" y="{top}" width="{width - 1:.1f}" '
                f'height="{height - 2}" fill-opacity="{0.12 + 0.88 * share:.2f}"><title>block {column}, '
                f"{escape(label)}: {value:.4g} {escape(unit)}</title></rect>"
            )
    bottom = TOP + len(rows) * height
    for column in range(0, columns, max(1, columns // 10)):
        parts.append(
            f'<text x="{left + (column + 0.5) * width:.1f}" y="{bottom + 16}" text-anchor="middle">{column}</text>'
        )
    parts.append(
        f'<text x="{left}" y="{bottom + 38}">block; {escape(unit)}, from {_short(min(known, default=0))} (light) '
        f"to {_short(max(known, default=0))} (dark)</text>"
    )
    words = (
        f"{unit} by block and kind of linear, from {_short(min(known, default=0))} to {_short(max(known, default=0))}."
    )
    return _svg(name, title, words, parts, bottom + 48)


def _frame(across: Axis, up: Axis, x: str, y: str, *, whole: bool = False) -> str:
    """The grid with its marks and both names; `whole` leaves out what is between whole numbers."""
    parts = []
    for value in across.ticks() if not whole else [one for one in across.ticks() if one == int(one)]:
        left = across.place(value)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{left:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_short(value)}</text>')
    for value in up.ticks():
        top = up.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(y)}</text>')
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _mark(index: int, x: float, y: float, size: float = 6.0) -> str:
    """A mark of its own for each of the first four series."""
    kind, colour = MARKS[index % len(MARKS)], f"s{index % COLOURS} mark"
    if kind == "circle":
        return f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "triangle": ((0, -1.2), (1.2, 1), (-1.2, 1)),
    }[kind]
    path = " ".join(f"{x + size * right:.1f},{y + size * down:.1f}" for right, down in corners)
    return f'<polygon class="{colour}" points="{path}"/>'


def _svg(name: str, title: str, words: str, parts: Sequence[str], height: float = HEIGHT) -> str:
    return (
        f'<svg id="{name}" role="img" aria-labelledby="{name}-title {name}-words" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'xmlns="http://www.w3.org/2000/svg"><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-words">{escape(words)}</desc>{"".join(parts)}</svg>'
    )
