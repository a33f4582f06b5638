"""The steps in which a policy is trained, as text: ranges of steps, for example `1:20,40:`."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping

from cotune.errors import ConfigError

FIELD = "policy.train"


@functools.lru_cache(256)
def step_ranges(text: str) -> tuple[tuple[int, int | None], ...]:
    """Read ranges of training steps such as `1:20,40:`, in order: first and last step, counted from 1, both included.

    A range without an end has None as its last step. Raises ConfigError if the text is not a list of ranges, a range is
    empty, or two overlap.
    """
    ranges: list[tuple[int, int | None]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9})?\s*", part, re.ASCII)
        if match is None:
            remedy = "Ranges of steps are written as FIRST:LAST or FIRST:, with commas between: 1:20,40:"
            raise ConfigError(FIELD, text, f"has {part!r}, which is not a range of steps", remedy)
        first = int(match[1])
        last = int(match[2]) if match[2] else None
        if first < 1:
            raise ConfigError(FIELD, text, f"has {part.strip()!r}: steps count from 1", "Begin with step 1.")
        if last is not None and last < first:
            fault = f"has {part.strip()!r}, which is empty: its last step is before its first"
            raise ConfigError(FIELD, text, fault, f"Write {last}:{first}, or leave it out.")
        ranges.append((first, last))
    ranges.sort(key=lambda range_: range_[0])
    for (first, last), (next_first, _) in itertools.pairwise(ranges):
        if last is None or next_first <= last:
            fault = f"has ranges that overlap in step {next_first}"
            remedy = f"End the range that begins with {first} before step {next_first}."
            if first == next_first:
                remedy = "Leave one of the two out."
            raise ConfigError(FIELD, text, fault, remedy)
    return tuple(ranges)


def within(text: str, step: int) -> bool:
    """Whether `step`, counted from 0 as in the records, is in the ranges of `text`. An empty text means every step."""
    if not text:
        return True
    number = step + 1
    return any(first <= number and (last is None or number <= last) for first, last in step_ranges(text))


def check_ranges(ranges: Mapping[str, str], steps: int) -> None:
    """Raise ConfigError if a range goes beyond the `steps` of the run, or if some step trains no policy at all.
    `ranges` has the text of each trained policy; an empty text means every step."""
    for text in filter(None, ranges.values()):
        for first, last in step_ranges(text):
            named_step = first if last is None else last
            if named_step > steps:
                fault = f"names step {named_step}, beyond the last step of the run"
                raise ConfigError(FIELD, text, fault, f"The run has {steps} steps: raise `steps`, or end it there.")
    if ranges and all(ranges.values()):  # a policy without ranges is trained in every step
        idle_step = _first_idle(ranges.values(), steps)
        if idle_step is not None:
            remedy = "Extend a range, or leave out `train` for one of the policies."
            raise ConfigError(FIELD, dict(ranges), f"leaves step {idle_step} without a policy that is trained", remedy)


def _first_idle(texts: Iterable[str], steps: int) -> int | None:
    """The first step (from 1) that is in no range; None if every step is in a range."""
    ranges: list[tuple[int, int | None]] = []
    for text in texts:
        ranges += step_ranges(text)
    ranges.sort(key=lambda range_: range_[0])

    next_step = 1  # all steps before it are in a range
    for first, last in ranges:
        if first > next_step:
            break
        if last is None:
            return None
        next_step = max(next_step, last + 1)
    return next_step if next_step <= steps else None
