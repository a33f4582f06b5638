"""The registry of figures by role and by policy. Curves, tables and the reference read it from `metrics.toml` in this
folder. A new figure needs an entry there and the code that computes it."""

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
    """Title and help for a role that learns from a teacher."""
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
    """Figures of a role with a column in the table of training; the optional ones last."""
    with_column = {name: metric for name, metric in registry()["roles"].items() if metric.column}
    return dict(sorted(with_column.items(), key=lambda item: item[1].optional))
