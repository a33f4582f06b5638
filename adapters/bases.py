"""Finds the base models of a run or an export after they were moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from cotune.errors import ConfigError

Moved = str | Path | Mapping[str, str | Path] | None
"""The new place of the only base model, or of each moved base model by its recorded name or the last part of it."""


def present_paths(recorded: Iterable[str], moved: Moved) -> dict[str, str]:
    """The present path of each base model, by the name or path that a run or an export recorded for it.

    `moved` is the new path of the only base model, or a mapping with the new path of each moved base model, by its
    recorded name or the last part of it. Other base models are still at their recorded path. Raises ConfigError if
    `moved` does not tell which base model it replaces.
    """
    names = list(dict.fromkeys(recorded))
    new_paths: Mapping[str, str | Path] = {}
    if isinstance(moved, str | Path):
        if len(names) > 1:
            fault = f"does not say which base model it replaces; there are {', '.join(names)}"
            raise ConfigError("model", str(moved), fault, f"Write OLD=NEW: --model {Path(names[0]).name}={moved}")
        new_paths = dict.fromkeys(names, moved)
    elif moved is not None:
        new_paths = moved
    present = {name: name for name in names}
    for old, new in new_paths.items():
        if old in present:
            present[old] = str(new)
            continue
        matching = [name for name in names if old == Path(name).name]
        if len(matching) != 1:
            fault = "is the last part of several base models" if matching else "replaces no base model"
            remedy = "Write its recorded name in full."
            raise ConfigError("model", f"{old}={new}", f"{fault}; there are {', '.join(names)}", remedy)
        (name,) = matching
        present[name] = str(new)
    return present
