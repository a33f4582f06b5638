"""The report of `cotune replay`: old and new side by side, or a summary of many episodes."""

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
    sources = f"{plural(repeated, 'call')} from the record" + (f", then {who}" if who and fork is not None else "")
    yield Text.assemble(("episode ", "bold"), (old.episode.id, NAME), f"  task {old.episode.task.id} · {sources}\n")
    names = ["new"] if len(found.new) == 1 else [f"new {number + 1}" for number in range(len(found.new))]
    table = grid("call", "role", "turn>", "old", *names)
    sides = [{(call.role, call.turn): call for call in seen.calls} for seen in (old, *found.new)]
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
        counts = cells((len(seen.calls), f"{seen.episode.latency:.2f}"))
        ends.add_row(name, scores(seen.rewards), *counts, _status(seen))
    yield ends
    for seen in found.new:
        if seen.episode.error:
            yield Text(f"\n{seen.episode.error}", style=BAD)


def _all(report: ReplayReport) -> Iterable[RenderableType]:
    pairs = [(one.old, now) for one in report.repetitions for now in one.new]
    changed = [
        (old, now) for old, now in pairs if (old.episode.status, old.rewards) != (now.episode.status, now.rewards)
    ]
    gains = [
        sum(now.rewards.values()) - sum(old.rewards.values())
        for old, now in pairs
        if old.episode.status == now.episode.status == "ok"
    ]
    who = f"answered by {report.who}" if report.who else "answered from the record"
    yield Text(f"{plural(len(pairs), 'episode')} run again, {who}\n", style="bold")
    counts = {
        "same outcome": len(pairs) - len(changed),
        "better": sum(gain > 0 for gain in gains),
        "worse": sum(gain < 0 for gain in gains),
        "diverged": report.diverged,
        "failed, had not before": report.failed,
    }
    table = grid("", "episodes>")
    for name, count in counts.items():
        table.add_row(name, str(count))
    yield table
    if names := sorted({name for old, _ in pairs for name in old.rewards}):
        means = grid("mean outcome", "old>", "new>")
        for name in names:
            means.add_row(name, *(_mean(side, name) for side in zip(*pairs, strict=True)))
        yield Text("")
        yield means
    causes: dict[str, list[str]] = {}
    for _, now in pairs:
        if now.episode.error:
            causes.setdefault(_PLACE.sub("", now.episode.error), []).append(now.episode.error)
    commonest = sorted(causes.values(), key=len, reverse=True)
    for texts in commonest[:_CAUSES]:
        yield Text(f"\n{len(texts)} x {'' if len(set(texts)) == 1 else 'at one place, first: '}{texts[0]}", style=BAD)
    if rest := sum(map(len, commonest[_CAUSES:])):
        yield Text(f"\n{plural(rest, 'episode')} with other errors", style=BAD)
    if changed:
        title = f"\nnot the same: {len(changed)}" + (f", the first {_LISTED}" if len(changed) > _LISTED else "")
        table = grid("episode", "task", "old", "new", "status", title=title)
        for old, now in changed[:_LISTED]:
            row = cells((Text(old.episode.id, style=NAME), old.episode.task.id))
            table.add_row(*row, scores(old.rewards), scores(now.rewards), _status(now))
        yield table


def _said(call: CallRecord | None) -> Text:
    if call is None:
        return Text("(not asked)", style=QUIET)
    if call.chosen is None:
        return Text(call.error or call.status, style=BAD)
    return Text(answer_line(call.candidates[call.chosen]), style=QUIET if call.replayed else "")


def _status(seen: Seen) -> Text:
    status = "diverged" if seen.episode.blame == "divergence" else seen.episode.status
    return Text(status, style=GOOD if status == "ok" else BAD)


def _mean(side: Sequence[Seen], name: str) -> str:
    values = [seen.rewards[name] for seen in side if name in seen.rewards]
    return f"{sum(values) / len(values):.3f} of {len(values)}" if values else "-"
