"""The phase of a run and the seconds of its phases, for the lines of steps and for screens that show a running run."""

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
"""The shortest time between two writes of the file that only change a count."""


class Activity:
    """The phase of a run, the seconds of all phases since the last step, and the time to the end.

    The time of a phase within another one does not count for the outer one, so the seconds of all phases add up to the
    time of a step.
    """

    def __init__(self, steps: int, folder: Path | None = None) -> None:
        """`folder` is the run folder, which gets the file with the phase."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._file = folder / NOW if folder else None
        self._now = Now(phase="load", steps=steps)
        self._open_phases: list[tuple[str, str]] = []  # name and object of each, the innermost last
        self._counts: dict[str, tuple[int, int]] = {}  # by phase: episodes that have ended, and all episodes
        self._seconds_added_at = time.perf_counter()
        self._written_at = 0.0
        self._first_step_began = self._step_began = time.perf_counter()
        self._steps_timed = 0

    @contextlib.contextmanager
    def phase(self, name: str, of: str = "") -> Iterator[None]:
        """Count the seconds within the block for this phase. `of` is the object of the phase, for example the names of
        policies."""
        self._add_seconds()
        self._open_phases.append((name, of))
        self._write(phase=name, of=of, since=time.time())
        try:
            yield
        finally:
            self._add_seconds()
            self._open_phases.pop()
            if self._open_phases:
                outer_name, outer_of = self._open_phases[-1]
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
        if time.monotonic() - self._written_at >= _SECONDS_BETWEEN_COUNTS or done + 1 == total:
            self._write()

    def begin(self, steps_done: int) -> None:
        """Start the clock of the steps of this process. The run has done `steps_done` steps before."""
        self._steps_timed = 0
        self._first_step_began = self._step_began = time.perf_counter()
        self._write(step=min(steps_done + 1, self._now.steps))

    def step(self, number: int) -> float:
        """Count step `number` (from 1) as done. Returns the estimated seconds to the end of the run."""
        self._steps_timed += 1
        self._step_began = time.perf_counter()
        self._now = msgspec.structs.replace(self._now, step=min(number + 1, self._now.steps))
        return self._seconds_left(self._now.steps - number) or 0.0

    def clear(self) -> None:
        """Start the seconds of the next step at 0."""
        self.seconds.clear()

    @property
    def text(self) -> str:
        """The phase in a line, for example `step 12/100  rollout, 37 of 64 episodes`."""
        done, total = self._counts.get(self._now.phase, (0, 0))
        now = msgspec.structs.replace(self._now, done=done, total=total)
        if not now.step:  # before the first step
            return now.text
        return f"step {now.step}/{now.steps}  {now.text}"

    def close(self) -> None:
        """Remove the file with the phase, because the run has ended."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _add_seconds(self) -> None:
        """Add the time since the last call of this function to the innermost phase."""
        time_now = time.perf_counter()
        if self._open_phases:
            innermost, _ = self._open_phases[-1]
            self.seconds[innermost] += time_now - self._seconds_added_at
        self._seconds_added_at = time_now

    def _seconds_left(self, steps: int) -> float | None:
        """Estimate the seconds of the remaining `steps`, with the present one, from the mean of the
        steps of this process. None before its first step is done."""
        if not self._steps_timed:
            return None
        if not steps:
            return 0.0
        mean = (self._step_began - self._first_step_began) / self._steps_timed
        spent = time.perf_counter() - self._step_began
        left_of_present_step = max(mean - spent, 0.0)
        return left_of_present_step + mean * (steps - 1)

    def _write(self, **changes: object) -> None:
        """Change fields of the present phase, and write it with its counts and the time to the end to the run's
        file."""
        seconds_left = self._seconds_left(self._now.steps - self._now.step + 1)
        self._now = msgspec.structs.replace(self._now, left=seconds_left, written=time.time(), **changes)
        # `changes` may have changed the phase, which decides which episodes are counted.
        done, total = self._counts.get(self._now.phase, (0, 0))
        self._now = msgspec.structs.replace(self._now, done=done, total=total)
        self._written_at = time.monotonic()
        if self._file is None:
            return
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_bytes(msgspec.json.encode(self._now))
            partial.replace(self._file)
        except OSError as error:  # if the disk is full, writing the records reports it
            log.debug("%s: %s", self._file, error)
