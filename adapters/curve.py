"""Draws the curves of a run as one SVG image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from cotune.reading.curves import Chart, Series
from cotune.tables import figure

WIDTH, HEIGHT = 420, 220
"""Size of one chart, in pixels; charts stand side by side."""
LEFT, TOP, RIGHT, BOTTOM = 52, 30, 12, 42
"""Margins of a chart around its axes, in pixels."""
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
    values: list[float] = []
    for line in chart.series:
        values += [value for value in line.values if value is not None]
    low = min(values)
    high = max(values)
    if chart.percent and high <= 1:
        low = 0.0
        high = 1.0
    left = x + LEFT
    right = x + WIDTH - RIGHT
    base = HEIGHT - BOTTOM
    yield _text(left, 18, chart.title, 'font-weight="bold"')
    yield f'<path d="M{left} {TOP}V{base}H{right}" fill="none" stroke="#afb8c1"/>'
    if high > low:
        yield _text(left - 6, TOP + 4, figure(high, chart.percent), 'text-anchor="end"')
    yield _text(left - 6, base + 4, figure(low, chart.percent), 'text-anchor="end"')
    yield _text(left, base + 15, f"step {chart.steps[0]}")
    yield _text(right, base + 15, str(chart.steps[-1]), 'text-anchor="end"')
    legend_x = left
    for line, hue in zip(chart.series, _HUES, strict=False):
        steps = (chart.steps[0], max(chart.steps[-1] - chart.steps[0], 1))
        points = _polyline_points(line, chart.steps, steps, (low, high), (left, right, base))
        yield f'<polyline points="{points}" fill="none" stroke="{hue}" stroke-width="1.8"/>'
        yield _text(legend_x, base + 32, line.label, f'fill="{hue}"')
        legend_x += 12 + 6 * len(line.label)


def _polyline_points(
    line: Series,
    steps: Sequence[int],
    span: tuple[int, int],
    bounds: tuple[float, float],
    frame: tuple[int, int, int],
) -> str:
    """The points of a polyline, in pixels. Steps without a value have no point.

    Args:
        steps: the steps of the chart.
        span: its first step, and the number of steps from there to the last.
        bounds: the values at its lower and upper edge.
        frame: its left, right and lower edge in pixels.
    """
    first, length = span
    low, high = bounds
    left, right, base = frame
    pixels_per_unit = (base - TOP) / ((high - low) or 1)
    points = []
    for step, value in zip(steps, line.values, strict=True):
        if value is not None:
            x = left + (step - first) / length * (right - left)
            y = base - (value - low) * pixels_per_unit
            points.append(f"{x:.1f},{y:.1f}")
    return " ".join(points)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'
