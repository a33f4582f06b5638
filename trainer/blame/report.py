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
    """The report: its size and outcome, luck or system, a row per role, decisive calls, notes, and the verdict."""
    lines: list[RenderableType] = [Text(_head(blame), style="bold"), Text(luck_sentence(blame))]
    if blame.roles:
        lines += [Text(""), _role_table(blame), Text("")]
        if blame.removes:
            lines.append(Text("change: points of the outcome, without the role's answers", style=QUIET))
        else:
            lines.append(Text("costs: mean of alone and last, in points of the outcome", style=QUIET))
            lines.append(Text("alone: gain with only this role swapped; last: loss with only it left", style=QUIET))
    if noise := scoring_sentence(blame):
        lines.append(Text(noise))
    if blame.episodes:
        lines += _decisive_calls(blame)
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


def _decisive_calls(blame: Blame) -> list[RenderableType]:
    """A table with a row per failed episode and the answer at its decisive call, and a count of these calls by role."""
    table = grid("task", "episode", "decisive call", "loss>", title="\nCalls that lost an episode")
    calls_by_role: Counter[str] = Counter()
    for row, lost in enumerate(blame.episodes):
        if lost.call is None:
            table.add_row(*cells([lost.task, lost.episode, lost.why, ""]))
            continue
        calls_by_role[lost.role] += 1
        loss = "not measured" if lost.loss is None else loss_points(lost.loss)
        call = f"{lost.call} {lost.role}"
        if lost.parallel:
            steps = ", ".join(str(step) for step in (lost.call, *lost.parallel))
            call = f"{steps} {lost.role} (parallel)"
        table.add_row(*cells([lost.task, lost.episode, call, loss]))
        table.below[row] = [Text(f"said: {lost.answer}", style=QUIET), Text(f"redraw: {lost.redraw}", style=QUIET)]
    lines: list[RenderableType] = [table]
    # A call was found by drawing its answer again: another answer of the same role wins. So this counts luck.
    if calls_by_role:
        counts = ", ".join(f"{role} {count}" for role, count in calls_by_role.most_common())
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


def _role_table(blame: Blame) -> Grid:
    """A table with a row per role: its effect on the outcome, on time and, if there are prices, on money. A last row
    has the noise of the scorer, if outcomes changed when runs were scored twice."""
    effect_columns = ["change>"] if blame.removes else ["costs>", "alone>", "last>"]
    table = grid("role", "calls>", *effect_columns, "seconds>", "money>")
    for role in blame.roles:
        if blame.removes:
            effects = [shown_points(blame, role.alone, signed=True)]
        else:
            effects = [shown_points(blame, interval) for interval in (role.score, role.alone, role.last)]
        seconds = "-" if role.seconds is None else shown_seconds(role.seconds)
        money = "" if role.cost is None else shown_money(role.cost, signed=True)
        table.add_row(*cells([role.role, f"{role.calls:.1f}", *effects, seconds, money]))
    noise = blame.scoring
    if noise is not None and noise.changed:
        other_columns = [""] * (len(effect_columns) + 1)
        table.add_row(*cells(["scoring noise", "", noise_points(noise, blame), *other_columns]))
    return table
