"""Progress of an evaluation: a bar per mode on a terminal, else a log line per mode."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from cotune.records import Episode
from cotune.terminal import terminal

log = logging.getLogger(__name__)

OnMode = Callable[[str, int], Callable[[Episode], None] | None]


@contextlib.contextmanager
def shown_progress() -> Iterator[OnMode]:
    """Give what `evaluate_modes` calls at the start of each mode."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = terminal(stderr=True)
    if not console.is_terminal:
        yield _logged
        return
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:

        def on_mode(mode: str, episodes: int) -> Callable[[Episode], None]:
            bar = bars.add_task(mode, total=episodes)
            return lambda _: bars.advance(bar)

        yield on_mode


def _logged(mode: str, episodes: int) -> None:
    log.info("evaluating %s on %d tasks", mode, episodes)
