"""How often `cotune blame` names a planted fault, from the results of `benchmarks.blame_applications`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from cotune.reading.blame import LEAST_EFFECT
from cotune.tables import Grid, cells, grid

Line = Mapping[str, Any]
"""The result of one analysis, or a hidden fault, which was not analysed."""
COLUMNS = (
    "hidden", "analysed", "first", "named", "all found", "one found", "wrong", "also", "nobody", "undecided",
    "reference", "last", "judge",
)  # fmt: skip


def summarize(lines: Sequence[Line], *by: str) -> list[dict[str, Any]]:
    """The counts of analyses by the values of some fields, such as the part and the error rate.

    `first`: a faulty role has the highest cost. `named`: the verdict names it, as the first one. `all found` and `one
    found`: all faulty roles, or at least one, are in the verdict. `wrong`: it has other roles alone. `also`: beside a
    faulty role it names one that costs less than 10 points. `last` and `judge`: the guess is a faulty role.
    """
    counts: defaultdict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for line in lines:
        counts[tuple(line[name] for name in by)].update(_count(line))
    summaries = []
    for group, count in sorted(counts.items()):
        summaries.append({**dict(zip(by, group, strict=True)), **{name: count[name] for name in COLUMNS}})
    return summaries


def _count(line: Line) -> list[str]:
    """The columns that a line counts in."""
    if line["hidden"]:
        return ["hidden"]
    guilty, verdict = set(line["guilty"]), line["verdict"]
    in_verdict = set(line["named"]) if verdict in ("named", "either") else set()
    innocent = [role for role in in_verdict - guilty if line["costs"][role] < LEAST_EFFECT]
    columns = {
        "analysed": True,
        "first": line["first"] in guilty,
        "named": verdict == "named" and line["named"][0] in guilty,
        "all found": bool(guilty) and guilty <= in_verdict,
        "one found": bool(guilty & in_verdict),
        "wrong": bool(in_verdict) and not guilty & in_verdict,
        "also": verdict == "named" and bool(guilty & in_verdict) and bool(innocent),
        "nobody": verdict == "nobody",
        "undecided": verdict == "undecided",
        "reference": verdict == "reference",
        "last": line["last"] in guilty,
        "judge": line["judge"] in guilty,
    }
    return [name for name, counts in columns.items() if counts]


def tables(lines: Sequence[Line]) -> list[Grid]:
    """The counts by error rate, by kind of error and by application; and the runs with frameworks, with the number that
    ended in another way than `benchmarks.blame_costs` expects."""
    planted = [line for line in lines if line["part"] == "planted"]
    shown = [
        _table(lines, "part", "rate", "fixed"),
        _table([line for line in planted if not line["hidden"]], "kind", "rate"),
        _table(planted, "application"),
        _frameworks([line for line in lines if line["frameworks"] and not line["hidden"]]),
    ]
    return [table for table in shown if table.row_count]


def _table(lines: Sequence[Line], *by: str) -> Grid:
    table = grid(*by, *(f"{name}>" for name in COLUMNS))
    for summary in summarize(lines, *by):
        table.add_row(*cells(summary.values()))
    return table


def _frameworks(lines: Sequence[Line]) -> Grid:
    """The runs of each application with its framework."""
    table = grid("application", "analyses>", "runs>", "ended unexpectedly>", "runs a second>")
    by_application: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_application[line["application"]].append(line)
    for name, of_application in sorted(by_application.items()):
        runs = sum(line["runs"] for line in of_application)
        differing = sum(line["differing"] for line in of_application)
        seconds = sum(line["seconds"] for line in of_application)
        table.add_row(*cells([name, len(of_application), runs, differing, f"{runs / seconds:.1f}"]))
    return table
