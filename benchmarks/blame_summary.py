"""How often `cotune blame` names a planted fault, from the lines of `benchmarks.blame_applications`."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from cotune.reading.blame import LEAST_EFFECT

Line = Mapping[str, Any]
"""An analysis of one planted fault."""


def summarize(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """By error rate, and by whether the faults are drawn or fixed: how often the faulty role is named.

    `all` are all faults. The application may hide some: `visible` are the faults whose measured costs over the
    repetitions have a mean of at least 10 points, and of at least twice the highest cost of another role. An analysis
    that misses a fault may measure too little for that, so `visible` favours the command. Without measured costs every
    fault is visible.
    """
    by_fault: defaultdict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        by_fault[line["rate"], line["fixed"], line["application"], line["guilty"]].append(line)
    counts: defaultdict[tuple[float, bool, str], Counter[str]] = defaultdict(Counter)
    for (rate, fixed, _, _), repetitions in by_fault.items():
        faults = ["all", "visible"] if _is_visible(repetitions) else ["all"]
        for name, line in itertools.product(faults, repetitions):
            _count_line(counts[rate, fixed, name], line)
    summaries = []
    for (rate, fixed, name), count in sorted(counts.items()):
        summaries.append({"rate": rate, "fixed": fixed, "faults": name, **dict(count)})
    return summaries


def _is_visible(repetitions: Sequence[Line]) -> bool:
    """Whether a fault costs something, by the analyses that measured it."""
    measured = [line for line in repetitions if line["cost"] is not None]
    if not measured:
        return True
    cost = fmean(line["cost"] for line in measured)
    others = fmean(line["others"] or 0.0 for line in measured)
    return cost >= max(LEAST_EFFECT, 2 * others)


def _count_line(count: Counter[str], line: Line) -> None:
    """Add the verdict of an analysis and the two guesses to the counts."""
    guilty = line["guilty"]
    count["analysed"] += 1
    count["first"] += line["first"] == guilty
    count["named"] += line["verdict"] == "named" and line["named"][0] == guilty
    count["wrong"] += line["verdict"] in ("named", "either") and guilty not in line["named"]
    count["last that spoke"] += line["last_that_spoke"] == guilty
    count["judge"] += line["judge"] == guilty
