"""What `cotune replay` prints: old and new side by side, or a summary of many episodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from cotune.records.structs import CallRecord
from cotune.tables import BAD, GOOD, NAME, QUIET, answer_line, cells, grid, plural, scores
from cotune.trainer.replay.replay import Repetition, ReplayReport, Seen

_CAUSES = 5
_PLACE = re.compile(r"character \d+: recorded .*", re.DOTALL)
_LISTED = 20


def render(report: ReplayReport) -> Group:
    """The report as tables."""
    found = report.repetitions
    parts = [*(_one(found[0], report.who) if len(found) == 1 and not report.interrupted else _all(report))]
    if report.interrupted:
        done = sum(len(one.new) for one in found)
        parts.append(Text(f"\ninterrupted: {done} of {plural(report.planned, 'episode')} were run again", style=BAD))
    return Group(*parts)


def _one(found: Repetition, who: str) -> Iterable[RenderableType]:
    old, fork = found.old, found.fork
    repeated = len(old.calls) if fork is None else fork
    said = f"{plural(repeated, 'call')} from the record" + (f", then {who}" if who and fork is not None else "")
    head = Text.assemble(("episode ", "bold"), (old.episode.id, NAME), f"  task {old.episode.task.id} · {said}\n")
    yield head
    names = ["new"] if len(found.new) == 1 else [f"new {number + 1}" for number in range(len(found.new))]
    table = grid("call", "role", "turn>", "old", *names)
    sides = [_by_place(seen) for seen in (old, *found.new)]
    places = dict.fromkeys(place for side in sides for place in side)
    for role, turn in sorted(places, key=lambda place: min(s[place].step for s in sides if place in s)):
        calls = [side.get((role, turn)) for side in sides]
        step = next(call.step for call in calls if call is not None)
        if any(call is not None and call.replayed is None for call in calls[1:]) or None in calls:
            table.add_row(*cells((step, role, turn)), *(_said(call) for call in calls))
    if table.row_count:
        yield table
    ends = grid("", "outcome", "calls>", "seconds>", "status")
    for name, seen in zip(("old", *names), (old, *found.new), strict=True):
        ends.add_row(name, *_ending(seen))
    yield ends
    for seen in found.new:
        if seen.episode.error:
            yield Text(f"\n{seen.episode.error}", style=BAD)


def _all(report: ReplayReport) -> Iterable[RenderableType]:
    new = [seen for one in report.repetitions for seen in one.new]
    same = sum(_same(one) for one in report.repetitions)
    worse = sum(_total(one.new[0]) < _total(one.old) for one in report.repetitions if _both_ended(one))
    better = sum(_total(one.new[0]) > _total(one.old) for one in report.repetitions if _both_ended(one))
    who = f"answered by {report.who}" if report.who else "answered from the record"
    yield Text(f"{plural(len(new), 'episode')} run again, {who}\n", style="bold")
    counts = grid("", "episodes>")
    for name, count in (
        ("same outcome", same), ("better", better), ("worse", worse), ("diverged", report.diverged),
        ("failed, had not before", report.failed),
    ):  # fmt: skip
        counts.add_row(name, str(count))
    yield counts
    names = sorted({name for one in report.repetitions for name in one.old.rewards})
    means = grid("mean outcome", "old>", "new>")
    for name in names:
        means.add_row(name, *(_mean(side, name) for side in ([one.old for one in report.repetitions], new)))
    if names:
        yield Text("")
        yield means
    causes: dict[str, list[str]] = {}
    for seen in new:
        if seen.episode.error:
            causes.setdefault(_PLACE.sub("", seen.episode.error), []).append(seen.episode.error)
    commonest = sorted(causes.values(), key=len, reverse=True)
    for texts in commonest[:_CAUSES]:
        yield Text(f"\n{len(texts)} x {'' if len(set(texts)) == 1 else 'at one place, first: '}{texts[0]}", style=BAD)
    if rest := sum(map(len, commonest[_CAUSES:])):
        yield Text(f"\n{plural(rest, 'episode')} with other errors", style=BAD)
    changed = [one for one in report.repetitions if not _same(one)]
    if changed:
        title = f"\nnot the same: {len(changed)}" + (f", the first {_LISTED}" if len(changed) > _LISTED else "")
        table = grid("episode", "task", "old", "new", "status", title=title)
        for one in changed[:_LISTED]:
            now = one.new[0]
            row = (Text(one.old.episode.id, style=NAME), one.old.episode.task.id)
            table.add_row(*cells(row), scores(one.old.rewards), scores(now.rewards), _status(now))
        yield table


def _by_place(seen: Seen) -> dict[tuple[str, int], CallRecord]:
    return {(call.role, call.turn): call for call in seen.calls}


def _said(call: CallRecord | None) -> Text:
    if call is None:
        return Text("(not asked)", style=QUIET)
    if call.chosen is None:
        return Text(call.error or call.status, style=BAD)
    return Text(answer_line(call.candidates[call.chosen]), style=QUIET if call.replayed else "")


def _ending(seen: Seen) -> Sequence[Text]:
    return [scores(seen.rewards), Text(str(len(seen.calls))), Text(f"{seen.episode.latency:.2f}"), _status(seen)]


def _status(seen: Seen) -> Text:
    episode = seen.episode
    return Text(
        "diverged" if episode.blame == "divergence" else episode.status, style=GOOD if episode.status == "ok" else BAD
    )


def _both_ended(one: Repetition) -> bool:
    return one.old.episode.status == one.new[0].episode.status == "ok"


def _same(one: Repetition) -> bool:
    now = one.new[0]
    return now.episode.status == one.old.episode.status and dict(now.rewards) == dict(one.old.rewards)


def _total(seen: Seen) -> float:
    return sum(seen.rewards.values())


def _mean(side: Sequence[Seen], name: str) -> str:
    found = [seen.rewards[name] for seen in side if name in seen.rewards]
    return f"{sum(found) / len(found):.3f} of {len(found)}" if found else "-"
