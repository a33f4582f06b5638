"""Find the stores and collectors of installed packages by the scheme of an address.

A package registers a function in its metadata, as an entry point whose name is the scheme. cotune registers its own
functions in the same way, so that core imports nothing from the layers to its right.
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
    """The entry points of a group. Not called for a path: to read the metadata of all packages takes about 30 ms."""
    from importlib.metadata import entry_points

    by_scheme: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        by_scheme[point.name] = (*by_scheme.get(point.name, ()), point)
    return by_scheme


def load_entry_point(group: str, scheme: str) -> Any:
    """Import the function that is registered for a scheme. Raises RunError if two packages register one, or if the
    import fails."""
    points = entry_points_by_scheme(group)[scheme]
    if len(points) > 1:
        packages = " and ".join(sorted(_package_name(point) for point in points))
        raise RunError(f"{packages} register {scheme}:// in {group}.", "Uninstall all but one of them.")
    (point,) = points
    try:
        return point.load()
    except Exception as error:
        package = _package_name(point)
        cause = f"{package} registers {point.value} for {scheme}://, which fails to import: {error_line(error)}."
        raise RunError(cause, f"Install what {package} needs, or correct its entry point.") from error


def _package_name(point: EntryPoint) -> str:
    """The package that registers an entry point. It reads the package's metadata, which takes milliseconds."""
    return point.dist.name if point.dist else point.value
