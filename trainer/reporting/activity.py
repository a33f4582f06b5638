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
"""Phases before the first step of a process. Their seconds are in its first line, but not in its rates."""
_SECONDS_BETWEEN_COUNTS = 0.5
"""Least seconds between two writes of the file that only update a count."""


class Activity:
    """The phase of a run, the seconds of all phases since the last step, and the time to the end.

    The time of a phase within another one does not count for the outer one, so the seconds of a step add up.
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
        self._steps_timed = 0

    @contextlib.contextmanager
    def phase(self, name: str, of: str = "") -> Iterator[None]:
        """Count the seconds within the block for this phase; `of` names its object, for example the policies."""
        self._add_seconds()
        self._open.append((name, of))
        self._write(phase=name, of=of, since=time.time())
        try:
            yield
        finally:
            self._add_seconds()
            self._open.pop()
            if self._open:
                outer_name, outer_of = self._open[-1]
                self._write(phase=outer_name, of=outer_of, since=time.time())

    def count(self, phase: str, episodes: int) -> None:
        """Set the number of episodes of a phase, which need not be the present one."""
        self._counts[phase] = (0, episodes)
        self._write()

    def further(self, phase: str, episodes: int) -> None:
        """Add to the number of episodes of a phase."""
        done, total = self._counts.get(phase, (0, 0))
        self._counts[phase] = (done, total + episodes)
        self._write()

    def advance(self, phase: str) -> None:
        """Count an episode of a phase that has ended."""
        done, total = self._counts.get(phase, (0, 0))
        self._counts[phase] = (done + 1, total)
        if time.monotonic() - self._written >= _SECONDS_BETWEEN_COUNTS or done + 1 == total:
            self._write()

    def begin(self, steps_done: int) -> None:
        """Start the clock of this process's steps; `steps_done` were done before."""
        self._steps_timed = 0
        self._begun = self._step_began = time.perf_counter()
        self._write(step=min(steps_done + 1, self._now.steps))

    def step(self, number: int) -> float:
        """Note that step `number` (from 1) is done. Returns the seconds to the end of the run."""
        self._steps_timed += 1
        self._step_began = time.perf_counter()
        self._now = msgspec.structs.replace(self._now, step=min(number + 1, self._now.steps))
        return self._seconds_left(self._now.steps - number) or 0.0

    def clear(self) -> None:
        """Start the seconds of the next step at 0."""
        self.seconds.clear()

    @property
    def text(self) -> str:
        """For example `step 12/100  rollout, 37 of 64 episodes`; before the first step without its number."""
        done, total = self._counts.get(self._now.phase, (0, 0))
        now = msgspec.structs.replace(self._now, done=done, total=total)
        return f"step {now.step}/{now.steps}  {now.text}" if now.step else now.text

    def close(self) -> None:
        """Remove the file with the phase: the run has ended."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _add_seconds(self) -> None:
        """Add the time since the last call of this function to the innermost phase."""
        time_now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1][0]] += time_now - self._since
        self._since = time_now

    def _seconds_left(self, steps: int) -> float | None:
        """Estimate the seconds of the remaining steps, the present one included, from the steps of this process."""
        if not self._steps_timed:
            return None
        if not steps:
            return 0.0
        mean = (self._step_began - self._begun) / self._steps_timed
        spent = time.perf_counter() - self._step_began
        return max(mean - spent, 0.0) + mean * (steps - 1)

    def _write(self, **changes: object) -> None:
        """Write the phase, its counts and the time to the end to the run's file, for screens."""
        seconds_left = self._seconds_left(self._now.steps - self._now.step + 1)
        self._now = msgspec.structs.replace(self._now, left=seconds_left, written=time.time(), **changes)
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
