"""The run that the code around this point belongs to."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple


class RunContext(NamedTuple):
    """Facts about the run that code needs at any depth of the stack."""

    folder: Path | None = None
    """The run folder, in which judges store their answers and costs."""
    request: str = ""
    """In a rollout worker: the id of the request whose episode runs here."""
    go_on: str = ""
    """How to continue if the process ends now: a sentence with a command."""


current_run: ContextVar[RunContext] = ContextVar("cotune_run", default=RunContext())  # noqa: B039  # a tuple
