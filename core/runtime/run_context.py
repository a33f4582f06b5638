"""The run that the code around this point belongs to."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple


class RunContext(NamedTuple):
    """What code must know about the run that it is part of, however deep it is called."""

    folder: Path | None = None
    """The run folder, where judges keep their answers and count their cost."""
    request: str = ""
    """In a rollout worker: the id of the request whose episode runs here."""
    go_on: str = ""
    """How to continue if the process ends now: a sentence with a command."""


current_run: ContextVar[RunContext] = ContextVar("cotune_run", default=RunContext())  # noqa: B039  # a tuple
