"""The report of `cotune replay`: old and new side by side, or a summary of many episodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from cotune.records.structs import CallRecord
from cotune.tables import BAD, GOOD, NAME, QUIET, answer_line, cells, grid, plural, scores
from cotune.trainer.replay.replay import EpisodeWithCalls, Repetition, ReplayReport

_CAUSES_SHOWN = 5
_CHANGED_SHOWN = 20
_POSITION = re.compile(r"character \d+: recorded .*", re.DOTALL)
"""The part of the error of a divergence that differs between episodes with the same cause."""


def render(report: ReplayReport) -> Group:
    """Render the report as tables."""
    parts: list[RenderableType]
    if len(report.repetitions) == 1 and not report.interrupted:
        parts = list(_one_episode(report.repetitions[0], report.who))
    else:
        parts = list(_many_episodes(report))
    if report.interrupted:
        done = sum(len(repetition.new) for repetition in report.repetitions)
        parts.append(Text(f"\ninterrupted: {done} of {plural(report.planned, 'episode')} were run again", style=BAD))
    return Group(*parts)


def _one_episode(repetition: Repetition, who: str) -> Iterable[RenderableType]:
    """Show the calls of a recorded episode next to the calls of its repetitions, then how all of them ended."""
    old = repetition.old
    fork = repetition.fork
    n_repeated = len(old.calls) if fork is None else fork
    sources = f"{plural(n_repeated, 'call')} from the record"
    if who and fork is not None:
        sources += f", then {who}"
    yield Text.assemble(("episode ", "bold"), (old.episode.id, NAME), f"  task {old.episode.task.id} · {sources}\n")

    # A column for each episode. Calls of the same role and turn share a row, in the order of their first step.
    columns = {"old": old}
    for number, new in enumerate(repetition.new, start=1):
        columns["new" if len(repetition.new) == 1 else f"new {number}"] = new
    calls_of_column: list[dict[tuple[str, int], CallRecord]] = []
    first_step: dict[tuple[str, int], int] = {}
    for episode in columns.values():
        calls_of_column.append({(call.role, call.turn): call for call in episode.calls})
        for key, call in calls_of_column[-1].items():
            first_step[key] = min(call.step, first_step.get(key, call.step))
    table = grid("call", "role", "turn>", *columns)
    for role, turn in sorted(first_step, key=first_step.__getitem__):
        row = [calls.get((role, turn)) for calls in calls_of_column]  # None for an episode without this call
        # Leave out rows where all repetitions got the recorded answer.
        any_new_answer = any(call is not None and call.replayed is None for call in row[1:])
        if any_new_answer or None in row:
            step = next(call.step for call in row if call is not None)
            table.add_row(*cells((step, role, turn)), *(_answer_cell(call) for call in row))
    if table.row_count:
        yield table

    ends = grid("", "outcome", "calls>", "seconds>", "status")
    for name, episode in columns.items():
        counts = cells((len(episode.calls), f"{episode.episode.latency:.2f}"))
        ends.add_row(name, scores(episode.rewards), *counts, _status_cell(episode))
    yield ends
    for new in repetition.new:
        if new.episode.error:
            yield Text(f"\n{new.episode.error}", style=BAD)


def _many_episodes(report: ReplayReport) -> Iterable[RenderableType]:
    """Show how many episodes ended as before, better, worse or with an error, and list the changed ones."""
    pairs: list[tuple[EpisodeWithCalls, EpisodeWithCalls]] = []
    for repetition in report.repetitions:
        pairs += [(repetition.old, new) for new in repetition.new]
    changed: list[tuple[EpisodeWithCalls, EpisodeWithCalls]] = []
    gains: list[float] = []
    for old, new in pairs:
        if (old.episode.status, old.rewards) != (new.episode.status, new.rewards):
            changed.append((old, new))
        if old.episode.status == new.episode.status == "ok":
            gains.append(sum(new.rewards.values()) - sum(old.rewards.values()))

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

    components: set[str] = set()
    for old, _ in pairs:
        components.update(old.rewards)
    if components:
        means = grid("mean outcome", "old>", "new>")
        all_old = [old for old, _ in pairs]
        all_new = [new for _, new in pairs]
        for name in sorted(components):
            means.add_row(name, _mean_cell(all_old, name), _mean_cell(all_new, name))
        yield Text("")
        yield means

    # Errors that differ only in the position of a divergence are one cause.
    errors_of_cause: dict[str, list[str]] = {}
    for _, new in pairs:
        if new.episode.error:
            errors_of_cause.setdefault(_POSITION.sub("", new.episode.error), []).append(new.episode.error)
    commonest = sorted(errors_of_cause.values(), key=len, reverse=True)
    for errors in commonest[:_CAUSES_SHOWN]:
        prefix = "" if len(set(errors)) == 1 else "at one place, first: "
        yield Text(f"\n{len(errors)} x {prefix}{errors[0]}", style=BAD)
    n_others = sum(map(len, commonest[_CAUSES_SHOWN:]))
    if n_others:
        yield Text(f"\n{plural(n_others, 'episode')} with other errors", style=BAD)

    if changed:
        title = f"\nnot the same: {len(changed)}"
        if len(changed) > _CHANGED_SHOWN:
            title += f", the first {_CHANGED_SHOWN}"
        table = grid("episode", "task", "old", "new", "status", title=title)
        for old, new in changed[:_CHANGED_SHOWN]:
            row = cells((Text(old.episode.id, style=NAME), old.episode.task.id))
            table.add_row(*row, scores(old.rewards), scores(new.rewards), _status_cell(new))
        yield table


def _answer_cell(call: CallRecord | None) -> Text:
    """Show the chosen answer of a call, or its error. Answers from the record are dim."""
    if call is None:
        return Text("(not asked)", style=QUIET)
    if call.chosen is None:
        return Text(call.error or call.status, style=BAD)
    return Text(answer_line(call.candidates[call.chosen]), style=QUIET if call.replayed else "")


def _status_cell(episode: EpisodeWithCalls) -> Text:
    status = "diverged" if episode.episode.blame == "divergence" else episode.episode.status
    return Text(status, style=GOOD if status == "ok" else BAD)


def _mean_cell(episodes: Sequence[EpisodeWithCalls], name: str) -> str:
    """Return the mean of a component over the episodes that have it, with their number."""
    values = [episode.rewards[name] for episode in episodes if name in episode.rewards]
    return f"{sum(values) / len(values):.3f} of {len(values)}" if values else "-"
