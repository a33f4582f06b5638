"""Renders pages from templates: values are escaped, numbers are short, control characters become visible marks."""

from __future__ import annotations

import functools
import math
import shlex
import time
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import msgspec

from cotune.integrations.web.viewer.chat import first_line, pretty
from cotune.reading.now import Now
from cotune.tables import figure, plural
from cotune.terminal import harmless

CUT = 4000
"""Most characters of a text in a list."""
PASSAGE = 300
"""Most characters of each text of a failed task."""
HUES = 8
"""Number of colours for roles."""


def render(template: str, **values: Any) -> str:
    """Render a template. A name that the template uses but that is not passed is an error."""
    return _templates().get_template(template).render(**values)


def asset(name: str) -> str:
    """The text of a file that comes with the viewer."""
    return files("cotune.integrations.web.viewer").joinpath("static", name).read_text(encoding="utf-8")


@functools.cache
def _templates() -> jinja2.Environment:
    """The environment of the pages' templates, with its filters. Values are escaped, and a misspelled name is an
    error.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cotune.integrations.web.viewer"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "signed": signed,
        "percent": percent,
        "plural": plural,
        "short": short,
        "duration": duration,
        "plain": plain,
        "line": lambda value: plain(first_line(value)),
        "passage": lambda value: first_line(plain(value), PASSAGE),
        "pretty": lambda value: plain(pretty(value)),
        "clock": clock,
        "shell": lambda value: plain(shlex.quote(str(value))),
        "doing": doing,
        "builtins": msgspec.to_builtins,
    }
    environment.globals |= {"address": address, "asset": asset, "cut": CUT}
    return environment


def plain(text: object) -> str:
    """A text with visible marks for control characters."""
    return harmless(str(text))


def address(*parts: object, **query: object) -> str:
    """A path on the server with quoted parts. Empty parameters and None are left out."""
    path = "/" + "/".join(quote(str(part), safe="") for part in parts)
    fields = {name: value for name, value in query.items() if value not in ("", None)}
    return f"{path}?{urlencode(fields)}" if fields else path


def number(value: float | None) -> str:
    """A figure with about three significant digits and separated thousands."""
    if value is None:
        return "–"
    return figure(value) if math.isfinite(value) else str(float(value)).replace("inf", "∞")


def signed(value: float) -> str:
    """A figure with its sign."""
    return f"{value:+.3g}"


def percent(value: float | None) -> str:
    """A share, in percent."""
    return "–" if value is None else figure(value, True)


def short(value: float) -> str:
    """A large count: 1.2k, 3.4M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return number(value)


def duration(seconds: float) -> str:
    """Seconds in a readable unit: 1.5 s, 12 min."""
    if 0 < seconds < 0.01:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 100 else f"{hours:.1f} h"


def doing(now: Now | None) -> str:
    """The phase of a run and the time to its end; empty if it is not running."""
    if now is None:
        return ""
    step = f"step {now.step:,} of {now.steps:,}: " if now.step else ""
    remaining = now.remaining()
    end = "" if remaining is None else f" · about {duration(remaining)} to the end"
    return f"{step}{now.text}{end}"


def clock(seconds: float) -> str:
    """Date and time in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "–"
