"""Stores and collectors by the scheme of their address, as the installed packages register them.

A package registers a function in its metadata, as an entry point whose name is the scheme. cotune registers its own in
the same way, so core imports nothing from the layers to its right.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from cotune.errors import RunError, error_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

STORES = "cotune.stores"
"""The group of functions that open a store: `(address, read_only) -> Store`."""
COLLECTORS = "cotune.collectors"
"""The group of functions that return this process's connection to a collector: `(address, app) -> Collector`."""


def scheme_of(address: object) -> str:
    """The scheme of an address such as `postgresql://...`; empty for a path."""
    scheme, separator, _ = str(address).partition("://")
    return scheme if separator else ""


@cache
def entry_points_by_scheme(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """The entry points of a group. Reading the metadata of all packages takes some 30 ms, so a path never asks."""
    from importlib.metadata import entry_points

    by_scheme: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        by_scheme[point.name] = (*by_scheme.get(point.name, ()), point)
    return by_scheme


def load_entry_point(group: str, scheme: str) -> Any:
    """Import what is registered for a scheme. Raises RunError if two packages register it, or if it fails to import."""
    points = entry_points_by_scheme(group)[scheme]
    packages = " and ".join(sorted(point.dist.name if point.dist else point.value for point in points))
    if len(points) > 1:
        raise RunError(f"{packages} register {scheme}:// in {group}.", "Uninstall all but one of them.")
    try:
        return points[0].load()
    except Exception as error:
        cause = f"{packages} registers {points[0].value} for {scheme}://, which fails to import: {error_line(error)}."
        raise RunError(cause, f"Install what {packages} needs, or correct its entry point.") from error
