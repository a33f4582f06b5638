"""The report of `cotune blame` for the terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from cotune.reading.blame import (
    DECISIVE,
    LEAST_TASKS,
    Blame,
    loss_points,
    luck_sentence,
    noise_points,
    scoring_sentence,
    shown_money,
    shown_outcome,
    shown_points,
    shown_seconds,
)
from cotune.tables import BAD, QUIET, Grid, cells, grid, plural

_REFERENCES = (
    "--reference openai:NAME      another model at the OpenAI-compatible address",
    "--reference FOLDER           a run, an export or a model on this machine",
    "--reference prompts:FOLDER   the same model with edited prompts",
    "--reference ROLE=...         one of these, for one role alone",
)


def render(blame: Blame) -> Group:
    """The report: luck or system, a row per role, the verdict."""
    lines: list[RenderableType] = [Text(_head(blame), style="bold"), Text(luck_sentence(blame))]
    if blame.roles:
        lines += [Text(""), _roles(blame), Text("")]
        if blame.removes:
            lines.append(Text("change: points of the outcome, without the role's answers", style=QUIET))
        else:
            lines.append(Text("costs: mean of alone and last, in points of the outcome", style=QUIET))
            lines.append(Text("alone: gain with only this role swapped; last: loss with only it left", style=QUIET))
    if noise := scoring_sentence(blame):
        lines.append(Text(noise))
    if blame.episodes:
        lines += _episodes(blame)
    if blame.failed:
        lines.append(Text(f"{plural(blame.failed, 'run')} raised an error, and count as the lowest outcome"))
    if blame.left_out:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(blame.left_out.items()))
        lines.append(Text(f"runs left out: {counts}", style=BAD))
    lines += [Text(note) for note in (*blame.notes, blame.ended) if note]
    if 0 < blame.tasks < LEAST_TASKS:
        lines.append(Text(f"With fewer than {LEAST_TASKS} tasks the figures are about these runs only."))
    lines += [Text(""), Text(blame.sentence, style="bold")]
    if blame.verdict == "untested" and not blame.removes:
        lines.append(Text(f"Roles: {', '.join(blame.all_roles)}. Possible references:"))
        lines += [Text(f"  {text}", style=QUIET) for text in _REFERENCES]
    return Group(*lines)


def _episodes(blame: Blame) -> list[RenderableType]:
    """A row per failed episode, and below it the answer at the decisive call."""
    table = grid("task", "episode", "decisive call", "loss>", title="\nCalls that lost an episode")
    for number, one in enumerate(blame.episodes):
        if one.call is None:
            table.add_row(*cells([one.task, one.episode, one.why, ""]))
            continue
        loss = "not measured" if one.loss is None else loss_points(one.loss)
        place = f"{one.call} {one.role}"
        if one.parallel:
            place = f"{', '.join(map(str, (one.call, *one.parallel)))} {one.role} (parallel)"
        table.add_row(*cells([one.task, one.episode, place, loss]))
        table.below[number] = [Text(f"said: {one.answer}", style=QUIET), Text(f"redraw: {one.redraw}", style=QUIET)]
    decisive = Counter(one.role for one in blame.episodes if one.call is not None)
    lines: list[RenderableType] = [table]
    if decisive:
        counts = ", ".join(f"{role} {count}" for role, count in decisive.most_common())
        lines += [
            Text(f"\ndecided by luck, by role: {counts} of {plural(len(blame.episodes), 'episode')}"),
            Text(DECISIVE, style=QUIET),
            Text("A redraw that wins shows luck, and not who is at fault: compare with a --reference.", style=QUIET),
        ]
    return lines


def _head(blame: Blame) -> str:
    """The first lines of the report: the size and cost of the analysis, and the outcome with and without references."""
    parts = [blame.workflow, plural(blame.tasks, "task"), plural(blame.runs, "run"), plural(blame.calls, "call")]
    if blame.cost is not None:
        parts.append(f"{shown_money(blame.cost)} of money")
    outcome = "" if blame.outcome is None else f"outcome {shown_outcome(blame, blame.outcome)}"
    if blame.swapped is not None:
        outcome += f", {shown_outcome(blame, blame.swapped)} with all roles swapped"
    return "\n".join(filter(None, [" · ".join(parts), outcome]))


def _roles(blame: Blame) -> Grid:
    """A row per role; money only with prices."""
    effects = ["change>"] if blame.removes else ["costs>", "alone>", "last>"]
    table = grid("role", "calls>", *effects, "seconds>", "money>")
    for one in blame.roles:
        if blame.removes:
            figures = [shown_points(blame, one.alone, signed=True)]
        else:
            figures = [shown_points(blame, interval) for interval in (one.score, one.alone, one.last)]
        seconds = "-" if one.seconds is None else shown_seconds(one.seconds)
        money = "" if one.cost is None else shown_money(one.cost, signed=True)
        table.add_row(*cells([one.role, f"{one.calls:.1f}", *figures, seconds, money]))
    noise = blame.scoring
    if noise is not None and noise.changed:
        table.add_row(*cells(["scoring noise", "", noise_points(noise, blame), *[""] * (len(effects) + 1)]))
    return table
