"""Draws the curves of a run as one SVG image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from cotune.reading.curves import Chart, Series
from cotune.tables import figure

WIDTH, HEIGHT = 420, 220
"""Size of one chart, in pixels; charts stand side by side."""
LEFT, TOP, RIGHT, BOTTOM = 52, 30, 12, 42
"""Margins of a chart around its axes, in pixels."""
_BASE = HEIGHT - BOTTOM
"""Lower edge of the area between the axes, in pixels from the top."""
_LETTER = 6
"""Approximate width of a letter of the legend, in pixels."""
_HUES = ("#1f6feb", "#d1495b", "#2a9d5c", "#b07d00", "#8250df", "#57606a")


def svg(charts: Sequence[Chart]) -> str:
    """An image of these charts: each with its lines, their names, and the ends of both axes."""
    parts: list[str] = []
    for number, chart in enumerate(charts):
        parts += _draw_chart(chart, number * WIDTH)
    size = f'width="{WIDTH * len(charts)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(charts)} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="#24292f"'
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', ground, *parts, "</svg>", ""])


def _draw_chart(chart: Chart, x: int) -> Iterator[str]:
    """SVG elements of one chart, whose left edge is at `x`."""
    plot = _Plot.of(chart, x)
    left = plot.left
    yield _text(left, 18, chart.title, 'font-weight="bold"')
    yield f'<path d="M{left} {TOP}V{_BASE}H{plot.right}" fill="none" stroke="#afb8c1"/>'
    if plot.high > plot.low:
        yield _text(left - 6, TOP + 4, figure(plot.high, chart.percent), 'text-anchor="end"')
    yield _text(left - 6, _BASE + 4, figure(plot.low, chart.percent), 'text-anchor="end"')
    yield _text(left, _BASE + 15, f"step {chart.steps[0]}")
    yield _text(plot.right, _BASE + 15, str(chart.steps[-1]), 'text-anchor="end"')
    legend_x = left
    for line, hue in zip(chart.series, _HUES, strict=False):
        points = plot.points(chart.steps, line)
        yield f'<polyline points="{points}" fill="none" stroke="{hue}" stroke-width="1.8"/>'
        yield _text(legend_x, _BASE + 32, line.label, f'fill="{hue}"')
        legend_x += 12 + _LETTER * len(line.label)


class _Plot(NamedTuple):
    """The area between the axes of a chart: its edges in pixels, and the steps and values at them."""

    left: int
    right: int
    first_step: int
    last_step: int
    low: float
    high: float

    @classmethod
    def of(cls, chart: Chart, x: int) -> _Plot:
        """The area of a chart whose left edge is at `x`. Its vertical axis reaches from the lowest to the highest value
        of the chart; for percentages, from 0 to 1.
        """
        values: list[float] = []
        for line in chart.series:
            values += [value for value in line.values if value is not None]
        low = min(values)
        high = max(values)
        if chart.percent and high <= 1:
            low = 0.0
            high = 1.0
        return cls(
            left=x + LEFT,
            right=x + WIDTH - RIGHT,
            first_step=chart.steps[0],
            last_step=chart.steps[-1],
            low=low,
            high=high,
        )

    def points(self, steps: Sequence[int], line: Series) -> str:
        """The points of a polyline, in pixels. Steps without a value have no point."""
        # A chart of one step or one value has no length or height: its points are at the lower left.
        step_span = max(self.last_step - self.first_step, 1)
        value_span = (self.high - self.low) or 1
        pixels_per_unit = (_BASE - TOP) / value_span
        points = []
        for step, value in zip(steps, line.values, strict=True):
            if value is not None:
                x = self.left + (step - self.first_step) / step_span * (self.right - self.left)
                y = _BASE - (value - self.low) * pixels_per_unit
                points.append(f"{x:.1f},{y:.1f}")
        return " ".join(points)


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{escape(text)}</text>'
