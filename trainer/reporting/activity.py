"""The phase of a run and the seconds of its phases: for the step lines, and for screens while it runs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cotune.reading.now import NOW, Now

log = logging.getLogger("cotune")

BEFORE = ("load", "look")
"""Phases before the first step of a process; their seconds are in its first line, and not in its rates."""
_BETWEEN = 0.5
"""Least seconds between two writes that only count."""


class Activity:
    """The phase of a run, the seconds of all phases since the last step, and the time to the end.

    A phase within another one takes its time from it, so that the seconds of a step add up.
    """

    def __init__(self, steps: int, folder: Path | None = None) -> None:
        """`folder` gets the file with the phase of the run."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._file = folder / NOW if folder else None
        self._now = Now(phase="load", steps=steps)
        self._open: list[tuple[str, str]] = []
        self._counts: dict[str, tuple[int, int]] = {}
        self._since = time.perf_counter()
        self._written = 0.0
        self._begun = self._step_began = time.perf_counter()
        self._made = 0

    @contextlib.contextmanager
    def phase(self, name: str, of: str = "") -> Iterator[None]:
        """Count the seconds within as those of this phase; `of` names its object."""
        self._book()
        self._open.append((name, of))
        self._show(phase=name, of=of, since=time.time())
        try:
            yield
        finally:
            self._book()
            self._open.pop()
            if self._open:
                outer, of = self._open[-1]
                self._show(phase=outer, of=of, since=time.time())

    def count(self, phase: str, episodes: int) -> None:
        """A phase, which need not be the one in hand, has so many episodes to run."""
        self._counts[phase] = (0, episodes)
        self._show()

    def further(self, phase: str, episodes: int) -> None:
        """It has so many more."""
        done, total = self._counts.get(phase, (0, 0))
        self._counts[phase] = (done, total + episodes)
        self._show()

    def advance(self, phase: str) -> None:
        """One of them has ended."""
        done, total = self._counts.get(phase, (0, 0))
        self._counts[phase] = (done + 1, total)
        if time.monotonic() - self._written >= _BETWEEN or done + 1 == total:
            self._show()

    def begin(self, made: int) -> None:
        """The steps begin after so many that were made before."""
        self._made = 0
        self._begun = self._step_began = time.perf_counter()
        self._show(step=min(made + 1, self._now.steps))

    def step(self, number: int) -> float:
        """A step is done; returns the seconds to the end of the run."""
        self._made += 1
        self._step_began = time.perf_counter()
        self._now = msgspec.structs.replace(self._now, step=min(number + 1, self._now.steps))
        return self._left(self._now.steps - number) or 0.0

    def clear(self) -> None:
        """Begin the seconds of the next step."""
        self.seconds.clear()

    @property
    def text(self) -> str:
        """`step 12/100  rollout, 37 of 64 episodes`; before the first step without its number."""
        done, total = self._counts.get(self._now.phase, (0, 0))
        now = msgspec.structs.replace(self._now, done=done, total=total)
        return f"step {now.step}/{now.steps}  {now.text}" if now.step else now.text

    def close(self) -> None:
        """The run ends: nothing is under way."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _book(self) -> None:
        """Add the time since this was called last to the innermost phase."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1][0]] += now - self._since
        self._since = now

    def _left(self, steps: int) -> float | None:
        """Seconds that so many steps take, the one in hand among them, by those of this process."""
        if not self._made:
            return None
        each = (self._step_began - self._begun) / self._made
        spent = time.perf_counter() - self._step_began
        return max(each - spent, 0.0) + each * (steps - 1) if steps else 0.0

    def _show(self, **changes: object) -> None:
        left = self._left(self._now.steps - self._now.step + 1)
        self._now = msgspec.structs.replace(self._now, left=left, written=time.time(), **changes)
        done, total = self._counts.get(self._now.phase, (0, 0))
        self._now = msgspec.structs.replace(self._now, done=done, total=total)
        self._written = time.monotonic()
        if self._file is None:
            return
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_bytes(msgspec.json.encode(self._now))
            partial.replace(self._file)
        except OSError as error:  # a full disk: writing the records fails with an error
            log.debug("%s: %s", self._file, error)
