"""Progress of an evaluation on standard error: a bar per mode on a terminal, else lines."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cotune.recording.records import Episode
from cotune.terminal import terminal

OnMode = Callable[[str, int], Callable[[Episode], None] | None]


class EvaluationProgress:
    """Says what is being waited for. `mode` is what `evaluate_modes` calls at the start of each mode."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or terminal(stderr=True)
        columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=self._console) if self._console.is_terminal else None

    def __enter__(self) -> EvaluationProgress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars:
            self._bars.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, soft_wrap=not self._console.is_terminal)

    def mode(self, mode: str, episodes: int) -> Callable[[Episode], None] | None:
        """Begin to show a mode; returns what to call after each of its episodes."""
        if self._bars is None:
            self.say(f"evaluating {mode} on {episodes} tasks ...")
            return None
        bars, bar = self._bars, self._bars.add_task(mode, total=episodes)
        return lambda _: bars.advance(bar)
