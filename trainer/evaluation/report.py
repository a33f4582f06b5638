"""The report of `cotune eval`: evaluations side by side, compared on the same tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cotune.reading.evaluations import Comparison, EvaluatedMode, EvaluationReport
from cotune.reading.headline import PLAIN_COLUMN
from cotune.records.policies import UNTRAINED
from cotune.sampling.responder import PolicyResponder
from cotune.tables import grid
from cotune.trainer.evaluation.assignments import kind_of
from cotune.trainer.evaluation.modes import Contest
from cotune.trainer.evaluation.run import share_floor
from cotune.trainer.evaluation.statistics import paired_difference, shown
from cotune.trainer.evaluation.verdict import tasks_for_points, tasks_for_this, verdict_on_reward, verdict_on_success

SHOWN = 3
"""Reasons of failure shown for each evaluation."""


def compare(after: EvaluatedMode, before: EvaluatedMode) -> Comparison:
    """Paired differences of success and rewards over the shared tasks. The verdict is on success where it is known,
    else on the trained reward, or the plain outcome where one of both has none; it names failures that differ.

    Nothing is compared where one role's gain is another's loss.
    """
    after, before = share_floor([after, before])
    label, against = after.label, before.label
    if roles := after.opposed or before.opposed:
        verdict = (
            f"nothing to compare between {label} and {against}: the rewards of {', '.join(roles)} add up to "
            "the same in every episode, so one role's gain is another's loss"
        )
        return Comparison(label=label, against=against, verdict=verdict)
    success = paired_difference(after.successes, before.successes)
    reward = paired_difference(after.rewards, before.rewards, bounds=_bounds_of_both(after, before))
    outcome = paired_difference(after.outcomes, before.outcomes)
    if success is not None:
        verdict = verdict_on_success(label, against, success, tasks_for_points(after.successes, before.successes))
    elif reward is not None:
        verdict = verdict_on_reward(label, against, reward, tasks_for_this(after.rewards, before.rewards))
    elif outcome is not None:
        verdict = verdict_on_reward(label, against, outcome, tasks_for_this(after.outcomes, before.outcomes))
    else:
        verdict = f"nothing to compare between {label} and {against}: no task ended with a reward in both"
    if after.failures * before.episodes != before.failures * after.episodes:
        verdict += (
            f"; failed episodes: {after.failures} of {after.episodes} of {label}, {before.failures} of "
            f"{before.episodes} of {against}"
        )
    return Comparison(
        label=label,
        against=against,
        success=success,
        reward=reward,
        outcome=outcome if after.outcome or before.outcome else None,
        calls=paired_difference(after.calls_by_task, before.calls_by_task),
        verdict=verdict,
    )


def _bounds_of_both(after: EvaluatedMode, before: EvaluatedMode) -> tuple[float, float] | None:
    """Bounds that hold for the rewards of both modes; None if those of one are not known."""
    if after.reward_bounds is None or before.reward_bounds is None:
        return None
    return min(after.reward_bounds[0], before.reward_bounds[0]), max(after.reward_bounds[1], before.reward_bounds[1])


def remarks(evaluations: Mapping[str, EvaluatedMode], contest: Contest, responder: PolicyResponder) -> Iterator[str]:
    """Notes on the figures: modes in which all episodes failed, figures that are missing, and the roles that no policy
    of a lineup played."""
    for label, mode in evaluations.items():
        if cause := mode.all_failed:
            yield f"All {mode.episodes} episodes of {label} failed, most often of: {cause}"
    sound = [mode for mode in evaluations.values() if mode.all_failed is None]
    if sound and all(mode.success is None for mode in sound):
        yield "No success rate: the workflow returns no `success`, so only its reward is reported."
    played = [mode for label, mode in evaluations.items() if label != "today"]
    seen = {role for mode in played for role in mode.roles}
    listed = {role for lineup in contest.lineups.values() for role in lineup.policies or ()}
    if any(mode.all_failed is None for mode in played):
        for role in sorted(listed - seen):
            yield f"Role {role!r} made no call."
    # Two runs that are compared may leave different roles to others.
    unlisted: Counter[tuple[str, str]] = Counter()
    provided: set[str] = set()
    for label, mode in evaluations.items():
        lineup = contest.lineups.get(label)
        others = lineup.others if lineup else None
        stand_in = responder.others if others is None else others.player
        if stand_in is None:
            who = "the application's own provider"
        else:
            # Of several models, the one that plays it is named.
            is_listed = stand_in.name in contest.lineups and stand_in.name != UNTRAINED.name
            who = stand_in.name if is_listed else "the untrained model"
        for role, calls in mode.unlisted.items():
            unlisted[role, who] += calls
        if label != "today":
            provided.update(responder.provider_roles if others is None else others.provider_roles)
    for role in sorted(seen & provided):
        yield f"Role {role!r} was left to the application's own provider."
    for (role, who), calls in sorted(unlisted.items()):
        yield f"Role {role!r} has no policy: {who} answered its {calls} calls (other_roles)."
    for label, mode in evaluations.items():
        if mode.use.uncounted:
            yield f"{label}: {mode.use.uncounted} of {mode.use.calls} calls report no tokens, and count as none."


def render(report: EvaluationReport) -> Group:
    """Tables for a terminal: results, differences, roles and use; then failures, notes and verdicts."""
    if report.assignments:
        tables = [_assignments(report), _effects(report), _pass_at(report), _use(report)]
    else:
        tables = [_results(report), _differences(report), _pass_at(report), _roles(report), _use(report)]
    parts: list[Any] = [part for table in tables if table.row_count for part in (table, "")]
    for label, mode in report.evaluations.items():
        counts = Counter({**mode.failed, **{f"scorer: {why}": n for why, n in mode.scorer_errors.items()}})
        ranked = counts.most_common()
        lines = [f"{label}: {n} x {why}" for why, n in ranked[:SHOWN]]
        if rest := ranked[SHOWN:]:
            lines.append(f"{label}: {sum(n for _, n in rest)} more, for {len(rest)} other reasons")
        parts.extend(Text(line, style="red") for line in lines)
    parts.extend(Text(note) for note in report.notes)
    # Of many assignments the effects say more than a verdict for each; all verdicts are in evaluation.json.
    comparisons = [c for c in report.comparisons if c.against == "today"] if report.assignments else report.comparisons
    parts.extend(Text(c.verdict, style="bold") for c in comparisons)
    parts.extend(Text(line, style="bold") for line in bill(report))
    return Group(*parts)


def bill(report: EvaluationReport) -> Iterator[str]:
    """Success and cost of each evaluation whose calls all have a price."""
    for label, e in report.evaluations.items():
        if e.use.cost is None or e.use.unpriced or e.use.uncounted:
            continue
        reached = f"success {shown(e.success, '.1%')}" if e.success else f"reward {shown(e.reward, '.3f')}"
        yield f"{label}: {reached} at {1000 * e.use.cost / max(e.episodes, 1):.4g} per 1,000 tasks"


def _results(report: EvaluationReport) -> Table:
    rows = report.evaluations
    columns, cells = _figures(list(rows.values()))
    title = f"Results{_sampled_at(rows.values())}, 95% intervals over n tasks"
    table = grid("", *columns, "episodes>", "failed>", "seconds>", title=title)
    for (label, e), figures in zip(rows.items(), cells, strict=True):
        table.add_row(label, *figures, str(e.episodes), str(e.failures), f"{e.seconds:.1f}")
    return table


def _assignments(report: EvaluationReport) -> Table:
    """A row for each assignment of models to roles, the best first, with its difference from the first one."""
    rows = report.evaluations
    roles = list(next(iter(report.assignments.values())))
    has_success = any(mode.success for mode in rows.values())
    measure, form = ("success", ".1%") if has_success else ("reward", ".3f")
    differences = {c.label: getattr(c, measure) for c in report.comparisons if c.label in report.assignments}
    first = next(iter(report.assignments))
    title = f"All assignments{_sampled_at(rows.values())}, the best first, 95% intervals over tasks"
    table = grid(*roles, "", f"{measure}>", "n>", f"less {first}>", "failed>", title=title)

    def score(label: str) -> float:
        figure = getattr(rows[label], measure)
        return figure.mean if figure else -math.inf

    for label in sorted(rows, key=score, reverse=True):
        figure = getattr(rows[label], measure)
        difference = differences.get(label)
        assignment = report.assignments.get(label)
        players = list(assignment.values()) if assignment else [label, *[""] * (len(roles) - 1)]
        table.add_row(
            *players,
            kind_of(assignment) if assignment else "",
            shown(figure, form),
            str(figure.n) if figure else "",
            shown(difference, f"+{form}") if difference else "",
            str(rows[label].failures),
        )
    return table


def _effects(report: EvaluationReport) -> Table:
    """What each model is worth in each role, whatever plays the other roles."""
    title = "One role's model exchanged, mean over the models of the other roles"
    table = grid("role", "model", "instead of", "difference>", "n>", title=title)
    for effect in report.effects:
        form = "+.1%" if effect.of_success else "+.3f"
        table.add_row(
            effect.role, effect.model, effect.against, shown(effect.difference, form), str(effect.difference.n)
        )
    return table


def _sampled_at(modes: Collection[EvaluatedMode]) -> str:
    """Which temperatures were used: one for all modes, or each mode with its own."""
    temperatures = {mode.label: mode.temperature for mode in modes if mode.temperature is not None}
    if not temperatures:
        return ""
    if len(set(temperatures.values())) == 1:
        return f" {_at(next(iter(temperatures.values())))}"
    return f" ({', '.join(f'{label} {_at(one)}' for label, one in temperatures.items())})"


def _at(temperature: float | str) -> str:
    return "at the application's own temperature" if temperature == "app" else f"at temperature {temperature:g}"


def _differences(report: EvaluationReport) -> Table:
    columns, cells = _figures(report.comparisons, "+")
    table = grid("", *columns, title="Differences on the same tasks, 95% intervals over n tasks")
    for c, figures in zip(report.comparisons, cells, strict=True):
        table.add_row(f"{c.label} - {c.against}", *figures)
    return table


def _figures(rows: Sequence[EvaluatedMode | Comparison], sign: str = "") -> tuple[list[str], list[list[str]]]:
    """Columns and cells of success, reward and, where a row has it, the plain outcome, with their numbers of tasks."""
    names = {"success": "success", "reward": "reward", "outcome": PLAIN_COLUMN}
    if not any(row.outcome for row in rows):
        del names["outcome"]
    cells = []
    for row in rows:
        figures = {name: getattr(row, name) for name in names}
        forms = {name: f"{sign}.1%" if name == "success" else f"{sign}.3f" for name in names}
        cells.append([text for name, f in figures.items() for text in (shown(f, forms[name]), str(f.n) if f else "")])
    return [column for name in names.values() for column in (f"{name}>", "n>")], cells


def _pass_at(report: EvaluationReport) -> Table:
    """How often one of k episodes succeeds, where tasks were run more than once."""
    ks = sorted({k for e in report.evaluations.values() for k in e.pass_at})
    title = "At least one of k episodes succeeds, 95% intervals over n tasks"
    table = grid("", *(f"pass@{k}>" for k in ks), "n>", title=title)
    for label, e in report.evaluations.items():
        if e.pass_at:
            table.add_row(label, *(shown(e.pass_at.get(k), ".1%") for k in ks), str(e.pass_at[ks[0]].n))
    return table


def _roles(report: EvaluationReport) -> Table:
    """A row per mode and role; its reward components are columns of their own."""
    rows = [(label, role, r) for label, e in report.evaluations.items() for role, r in e.roles.items()]
    components = sorted({name for _, _, r in rows for name in r.rewards})
    failed, cut = any(r.failed for _, _, r in rows), any(r.truncated for _, _, r in rows)
    optional = [*(["failed>"] if failed else []), *(["cut off>"] if cut else []), *(f"{name}>" for name in components)]
    columns = ("answered by", "calls>", "turns>", "tokens>", *optional)
    table = grid("", *columns, title="Roles, means per call")
    for label, role, r in rows:
        cells = [str(r.calls), f"{r.turns:.1f}", f"{r.prompt_tokens:.0f}+{r.completion_tokens:.1f}"]
        cells += [str(r.failed)] * failed + [f"{r.truncated:.1%}"] * cut
        cells += [f"{r.rewards[name]:.3f}" if name in r.rewards else "-" for name in components]
        table.add_row(f"{label} {role}", ", ".join(r.policies), *cells)
    return table


def _use(report: EvaluationReport) -> Table:
    """A row per mode, and one per comparison for the calls; money only where prices were given."""
    cost = any(e.use.cost is not None for e in report.evaluations.values())
    columns = ["calls>", "tokens>", "seconds>", *(["cost>"] if cost else [])]
    table = grid("", *columns, title="Means per episode")
    for label, e in report.evaluations.items():
        n = max(e.episodes, 1)
        tokens = f"{e.use.prompt_tokens / n:.0f}+{e.use.completion_tokens / n:.0f}"
        money = "-" if e.use.cost is None else f"{e.use.cost / n:.6f}"
        if e.use.cost is not None and e.use.unpriced:
            money += f" ({e.use.unpriced} calls without a price)"
        seconds = shown(e.use.seconds, ".3f")
        table.add_row(label, f"{e.use.calls / n:.1f}", tokens, seconds, *([money] if cost else []))
    for c in report.comparisons:
        # Most applications make the same calls in every episode.
        if c.calls is not None and (c.calls.mean or c.calls.low or c.calls.high) and not report.assignments:
            table.add_row(f"{c.label} - {c.against}", shown(c.calls, "+.1f"), "", "", *([""] if cost else []))
    return table
