"""The registry of figures by role and by policy: `metrics.toml` beside this file, which curves, tables and the
reference read. A new figure needs the code that computes it, and its entry there."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files

import msgspec


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a step. The fields are explained at the head of metrics.toml."""

    title: str = ""
    help: str = ""
    taught_title: str = ""
    taught: str = ""
    """Title and help where the role learns from a teacher."""
    share: bool = False
    column: str = ""
    optional: bool = False
    of: str
    formula: str
    sign: str = ""


@functools.cache
def registry() -> Mapping[str, Mapping[str, Metric]]:
    """The figures under `roles` and `policies`, by name."""
    text = files("cotune.reading").joinpath("metrics.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, dict[str, Metric]])


def columns() -> dict[str, Metric]:
    """Figures of a role that have a column in the table of training; the optional ones last."""
    found = [(name, metric) for name, metric in registry()["roles"].items() if metric.column]
    return dict(sorted(found, key=lambda one: one[1].optional))
