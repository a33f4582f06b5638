"""Where the base models of a run or an export lie now, if elsewhere than it says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from cotune.errors import ConfigError

Moved = str | Path | Mapping[str, str | Path] | None
"""The place of the only base model, or the place of each that was moved, by the name that was recorded or the last part
of it."""


def places(moved: Moved, recorded: Iterable[str]) -> dict[str, str]:
    """Where each recorded base model lies now. Raises ConfigError where it is not clear which of them is meant."""
    names = list(dict.fromkeys(recorded))
    if isinstance(moved, str | Path):
        if len(names) > 1:
            fault = f"does not say which base model it replaces; there are {', '.join(names)}"
            raise ConfigError("model", str(moved), fault, f"Write OLD=NEW: --model {Path(names[0]).name}={moved}")
        moved = dict.fromkeys(names, moved)
    found = {name: name for name in names}
    for old, new in (moved or {}).items():
        meant = [name for name in names if old == name] or [name for name in names if old == Path(name).name]
        if len(meant) != 1:
            fault = "is the last part of several base models" if meant else "replaces no base model"
            raise ConfigError("model", f"{old}={new}", f"{fault}; there are {', '.join(names)}", "Write one as it is.")
        found[meant[0]] = str(new)
    return found
