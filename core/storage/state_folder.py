"""The folder in which cotune keeps files for a user between processes, outside of run folders."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """`cotune` in XDG_STATE_HOME, or in ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local/state") / "cotune"
