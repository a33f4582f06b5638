"""Curves of a run as one SVG image, which any page shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from cotune.reading.curves import Chart, Series
from cotune.tables import figure

WIDTH, HEIGHT = 420, 220
"""Of one chart, in pixels; charts stand side by side."""
LEFT, TOP, RIGHT, BOTTOM = 52, 30, 12, 42
_HUES = ("#1f6feb", "#d1495b", "#2a9d5c", "#b07d00", "#8250df", "#57606a")


def svg(charts: Sequence[Chart]) -> str:
    """An image of these charts: each with its lines, their names, and the ends of both axes."""
    parts = [part for place, chart in enumerate(charts) for part in _chart(chart, place * WIDTH)]
    size = f'width="{WIDTH * len(charts)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(charts)} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="#24292f"'
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', ground, *parts, "</svg>", ""])


def _chart(chart: Chart, x: int) -> Iterator[str]:
    known = [value for line in chart.series for value in line.values if value is not None]
    low, high = (0.0, 1.0) if chart.percent and max(known) <= 1 else (min(known), max(known))
    left, right, base = x + LEFT, x + WIDTH - RIGHT, HEIGHT - BOTTOM
    yield _text(left, 18, chart.title, 'font-weight="bold"')
    yield f'<path d="M{left} {TOP}V{base}H{right}" fill="none" stroke="#afb8c1"/>'
    for value, y in ((high, TOP), (low, base)) if high > low else ((low, base),):
        yield _text(left - 6, y + 4, figure(value, chart.percent), 'text-anchor="end"')
    yield _text(left, base + 15, f"step {chart.steps[0]}")
    yield _text(right, base + 15, str(chart.steps[-1]), 'text-anchor="end"')
    legend = left
    for line, hue in zip(chart.series, _HUES, strict=False):
        steps = (chart.steps[0], max(chart.steps[-1] - chart.steps[0], 1))
        points = _points(line, chart.steps, steps, (low, high), (left, right, base))
        yield f'<polyline points="{points}" fill="none" stroke="{hue}" stroke-width="1.8"/>'
        yield _text(legend, base + 32, line.label, f'fill="{hue}"')
        legend += 12 + 6 * len(line.label)


def _points(
    line: Series,
    steps: Sequence[int],
    span: tuple[int, int],
    bounds: tuple[float, float],
    frame: tuple[int, int, int],
) -> str:
    (first, length), (low, high), (left, right, base) = span, bounds, frame
    height = (base - TOP) / ((high - low) or 1)
    found = [(step, value) for step, value in zip(steps, line.values, strict=True) if value is not None]
    places = [(left + (step - first) / length * (right - left), base - (value - low) * height) for step, value in found]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'
