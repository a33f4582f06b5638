"""Finds the base models of a run or an export after they were moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from cotune.errors import ConfigError

Moved = str | Path | Mapping[str, str | Path] | None
"""The new place of the only base model, or of each moved base model by its recorded name or the last part of it."""


def places(moved: Moved, recorded: Iterable[str]) -> dict[str, str]:
    """The present path of each recorded base model, by recorded name. `moved` names the models that were moved.

    It is a path if there is one base model, otherwise a mapping from recorded names, or their last parts, to paths.
    Raises ConfigError if it does not tell which base model it replaces.
    """
    names = list(dict.fromkeys(recorded))
    if isinstance(moved, str | Path):
        if len(names) > 1:
            fault = f"does not say which base model it replaces; there are {', '.join(names)}"
            raise ConfigError("model", str(moved), fault, f"Write OLD=NEW: --model {Path(names[0]).name}={moved}")
        moved = dict.fromkeys(names, moved)
    present = {name: name for name in names}
    for old, new in (moved or {}).items():
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
