"""Line charts as SVG, to stand in a page.

Drawn here and not by a library: matplotlib's SVG has fixed colours (a page has a light and a dark form), and
100 KB a chart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import attrs

from fnaccel.seeing.runs import Points

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 34
_POINTS = 400
_SMOOTH_FROM = 60


@attrs.frozen
class Line:
    """A line of a chart.

    Attributes:
        name: in the legend, and of the points.
        colour: the number of a colour of the page.
        points: (step, value).
    """

    name: str
    colour: int
    points: Points


def line_chart(title: str, lines: Sequence[Line], restarts: Sequence[int] = ()) -> str:
    """One chart: thin lines as logged, thick lines smoothed if there are many points.

    The scale is logarithmic if values are positive and the largest is a hundred times the smallest. Values
    that are not finite are red marks at the top. A point shows its values if the pointer rests on it.

    Args:
        title: read by screen readers.
        lines: with one finite value or more.
        restarts: steps at which a run was started again, as dashed lines.
    """
    plane = _Plane.of(lines)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">', *plane.grid()]
    parts += (
        f'<path class="restart" d="M{plane.x(step)} {_TOP}V{HEIGHT - _BOTTOM}">'
        f"<title>started again at step {step}</title></path>"
        for step in restarts
    )
    for line in lines:
        parts += plane.drawn(line)
    return "".join([*parts, "</svg>"])


def number(value: float) -> str:
    """A number as short as a chart needs it.

    Example:
        >>> number(0.0003), number(25000.0), number(0.5), number(1234567.0)
        ('3e-4', '25k', '0.5', '1.23M')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    # the limits are those after rounding: 999,999 is 1M, and not 1000k
    for limit, size_of_unit, unit in ((999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (9999.5, 1e3, "k")):
        if size >= limit:
            return f"{value / size_of_unit:.3g}{unit}"
    return f"{value:.4g}"


@attrs.frozen
class _Plane:
    """The area of a chart."""

    across: _Axis
    down: _Axis

    @staticmethod
    def of(lines: Sequence[Line]) -> _Plane:
        values = [value for line in lines for _, value in line.points if math.isfinite(value)]
        steps = [step for line in lines for step, _ in line.points]
        log = min(values) > 0 and max(values) / min(values) >= 100
        return _Plane(_Axis.of(steps, log=False), _Axis.of(values, log=log))

    def x(self, step: float) -> float:
        """From the left, in the units of the picture."""
        return round(_LEFT + self.across.share(step) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        """From the top, in the units of the picture."""
        return round(HEIGHT - _BOTTOM - self.down.share(value) * (HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self) -> Iterator[str]:
        """Lines and numbers of both axes."""
        for value in self.down.ticks:
            y = self.y(value)
            yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
            yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{number(value)}</text>'
        for step in self.across.ticks:
            place = f'x="{self.x(step)}" y="{HEIGHT - 12}" text-anchor="middle"'
            yield f'<text class="tick" {place}>{number(step)}</text>'

    def drawn(self, line: Line) -> Iterator[str]:
        """A line, its points, and the marks of values that are not finite."""
        finite = [point for point in line.points if math.isfinite(point[1])]
        colour = f"var(--line-{line.colour})"
        smooth = len(finite) > _SMOOTH_FROM
        yield self._path(_thinned(finite), f'class="line{" raw" if smooth else ""}" stroke="{colour}"')
        if smooth:
            yield self._path(_smoothed(finite), f'class="line" stroke="{colour}"')
        if len(finite) == 1:
            ((step, value),) = finite
            yield f'<circle r="4" cx="{self.x(step)}" cy="{self.y(value)}" fill="{colour}"/>'
        for step, value in finite[:: max(1, len(finite) // 60)]:
            label = f"<title>{escape(line.name)}, step {step:.0f}: {value:.6g}</title>"
            yield f'<circle class="point" r="9" cx="{self.x(step)}" cy="{self.y(value)}">{label}</circle>'
        broken = [point for point in line.points if not math.isfinite(point[1])]
        for step, value in broken[:: max(1, len(broken) // 60)]:
            label = f"<title>{escape(line.name)}, step {step:.0f}: {value}</title>"
            yield f'<path class="broken" d="M{self.x(step) - 4} {_TOP}h8l-4 8z">{label}</path>'

    def _path(self, points: Points, style: str) -> str:
        places = " ".join(f"{self.x(step)},{self.y(value)}" for step, value in points)
        return f'<polyline {style} points="{places}"/>'


@attrs.frozen
class _Axis:
    """One direction of a chart: its limits, its ticks, and whether it is logarithmic."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool

    @staticmethod
    def of(values: Sequence[float], *, log: bool) -> _Axis:
        low, high = min(values), max(values)
        if low == high:
            low, high = low - abs(low or 1.0) / 10, high + abs(high or 1.0) / 10
        if log:
            exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            each = max(1, len(exponents) // 6)
            ticks = tuple(10.0**e for e in exponents if e % each == 0)
            return _Axis(low, high, tuple(t for t in ticks if low <= t <= high), log=True)
        # ticks at 1, 2 or 5 times a power of ten
        rough = (high - low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        gap = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
        first = math.ceil(low / gap - 1e-9)
        return _Axis(
            low, high, tuple(gap * n for n in range(first, math.floor(high / gap + 1e-9) + 1)), log=False
        )

    def share(self, value: float) -> float:
        """The place of a value, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _thinned(points: Points) -> Points:
    """Few enough points for a page: of each stretch the lowest and the highest."""
    if len(points) <= _POINTS:
        return points
    size = math.ceil(2 * len(points) / _POINTS)
    thinned: Points = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = (min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1]))
        thinned += sorted({*ends})
    return thinned


def _smoothed(points: Points) -> Points:
    """Means over about a fortieth of the points."""
    size = max(2, len(points) // 40)
    smoothed: Points = []
    for start in range(0, len(points) - size + 1, max(1, size // 2)):
        stretch = points[start : start + size]
        smoothed.append((sum(p[0] for p in stretch) / size, sum(p[1] for p in stretch) / size))
    return smoothed
