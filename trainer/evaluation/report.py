"""The report of `cotune eval`: evaluations side by side, compared on the same tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cotune.intervals import Interval
from cotune.reading.evaluations import Comparison, EvaluatedMode, EvaluationReport, RoleStatistics
from cotune.reading.headline import PLAIN_COLUMN
from cotune.records.policies import UNTRAINED
from cotune.sampling.responder import PolicyResponder
from cotune.tables import grid
from cotune.trainer.evaluation.assignments import kind_of
from cotune.trainer.evaluation.modes import Contest
from cotune.trainer.evaluation.run import share_floor
from cotune.trainer.evaluation.statistics import paired_difference, shown
from cotune.trainer.evaluation.verdict import tasks_for_points, tasks_for_this, verdict_on_reward, verdict_on_success

REASONS_SHOWN = 3
"""Reasons of failure shown for each evaluation."""


def compare(after: EvaluatedMode, before: EvaluatedMode) -> Comparison:
    """Compare two evaluations by the paired differences of success and rewards over the shared tasks.

    The verdict is on success if both report it, else on the trained reward, else on the plain outcome. It names the
    failed episodes if their shares differ. If one role's gain is another's loss, nothing is compared.
    """
    after, before = share_floor([after, before])
    label = after.label
    against = before.label
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
    """Return the bounds that hold for the rewards of both modes; None if one of them has no declared bounds."""
    if after.reward_bounds is None or before.reward_bounds is None:
        return None
    return min(after.reward_bounds[0], before.reward_bounds[0]), max(after.reward_bounds[1], before.reward_bounds[1])


def remarks(evaluations: Mapping[str, EvaluatedMode], contest: Contest, responder: PolicyResponder) -> Iterator[str]:
    """Yield notes on the figures: modes in which all episodes failed, figures that are missing, and the roles that no
    policy of a lineup played."""
    for label, mode in evaluations.items():
        if cause := mode.all_failed:
            yield f"All {mode.episodes} episodes of {label} failed, most often of: {cause}"
    sound = [mode for mode in evaluations.values() if mode.all_failed is None]
    if sound and all(mode.success is None for mode in sound):
        yield "No success rate: the workflow returns no `success`, so only its reward is reported."

    # Roles that have a policy and made no call in any mode with cotune's own sampler.
    sampled_modes = {label: mode for label, mode in evaluations.items() if label != "today"}
    roles_with_policy: set[str] = set()
    for lineup in contest.lineups.values():
        roles_with_policy.update(lineup.policies or ())
    roles_that_called: set[str] = set()
    for mode in sampled_modes.values():
        roles_that_called.update(mode.roles)
    if any(mode.all_failed is None for mode in sampled_modes.values()):
        for role in sorted(roles_with_policy - roles_that_called):
            yield f"Role {role!r} made no call."

    yield from _notes_on_other_players(evaluations, contest, responder, roles_that_called)
    for label, mode in evaluations.items():
        if mode.use.uncounted:
            yield f"{label}: {mode.use.uncounted} of {mode.use.calls} calls report no tokens, and count as none."


def _notes_on_other_players(
    evaluations: Mapping[str, EvaluatedMode],
    contest: Contest,
    responder: PolicyResponder,
    roles_that_called: Collection[str],
) -> Iterator[str]:
    """Yield a note for each role that the application's own provider played, or that has no policy and was played by
    another model. Two runs that are compared may differ in these roles, so the notes are joined over the modes."""
    calls_of_other_players: Counter[tuple[str, str]] = Counter()  # by role, and the text of the player
    provider_roles: set[str] = set()
    for label, mode in evaluations.items():
        # The player of roles without a policy: as the lineup says, or else as for all lineups.
        lineup = contest.lineups.get(label)
        others = lineup.others if lineup else None
        player = responder.others if others is None else others.player
        if player is None:
            player_text = "the application's own provider"
        elif player.name in contest.lineups and player.name != UNTRAINED.name:
            player_text = player.name  # with several models, the note names the one that played the role
        else:
            player_text = "the untrained model"
        for role, calls in mode.unlisted.items():
            calls_of_other_players[role, player_text] += calls
        if label != "today":
            provider_roles.update(responder.provider_roles if others is None else others.provider_roles)
    for role in sorted(provider_roles.intersection(roles_that_called)):
        yield f"Role {role!r} was left to the application's own provider."
    for (role, player_text), calls in sorted(calls_of_other_players.items()):
        yield f"Role {role!r} has no policy: {player_text} answered its {calls} calls (other_roles)."


def render(report: EvaluationReport) -> Group:
    """Render a report for a terminal: tables of results, differences, roles and use; then failures, notes, verdicts."""
    if report.assignments:
        tables = [_assignments_table(report), _effects_table(report), _pass_at_table(report), _use_table(report)]
    else:
        tables = [
            _results_table(report),
            _differences_table(report),
            _pass_at_table(report),
            _roles_table(report),
            _use_table(report),
        ]
    parts: list[Any] = []
    for table in tables:
        if table.row_count:
            parts += [table, ""]
    for label, mode in report.evaluations.items():
        parts.extend(Text(line, style="red") for line in _failure_lines(label, mode))
    parts.extend(Text(note) for note in report.notes)

    # With many assignments, the effects say more than one verdict for each. All verdicts are in evaluation.json.
    for comparison in report.comparisons:
        if not report.assignments or comparison.against == "today":
            parts.append(Text(comparison.verdict, style="bold"))
    parts.extend(Text(line, style="bold") for line in bill(report))
    return Group(*parts)


def _failure_lines(label: str, mode: EvaluatedMode) -> list[str]:
    """Return a line for each of the commonest reasons of failure of a mode, and one for all others."""
    counts = Counter(mode.failed)
    for error, count in mode.scorer_errors.items():
        counts[f"scorer: {error}"] = count
    ranked = counts.most_common()
    lines = [f"{label}: {count} x {reason}" for reason, count in ranked[:REASONS_SHOWN]]
    others = ranked[REASONS_SHOWN:]
    if others:
        lines.append(f"{label}: {sum(count for _reason, count in others)} more, for {len(others)} other reasons")
    return lines


def bill(report: EvaluationReport) -> Iterator[str]:
    """Yield the success and the cost of each evaluation whose calls all have a price."""
    for label, mode in report.evaluations.items():
        if mode.use.cost is None or mode.use.unpriced or mode.use.uncounted:
            continue
        result = f"success {shown(mode.success, '.1%')}" if mode.success else f"reward {shown(mode.reward, '.3f')}"
        yield f"{label}: {result} at {1000 * mode.use.cost / max(mode.episodes, 1):.4g} per 1,000 tasks"


def _results_table(report: EvaluationReport) -> Table:
    """A row of results for each mode."""
    modes = report.evaluations
    figures = _figures_of(list(modes.values()))
    title = f"Results{_sampled_at(modes.values())}, 95% intervals over n tasks"
    table = grid("", *_figure_columns(figures), "episodes>", "failed>", "seconds>", title=title)
    for label, mode in modes.items():
        cells = _figure_cells(mode, figures)
        table.add_row(label, *cells, str(mode.episodes), str(mode.failures), f"{mode.seconds:.1f}")
    return table


def _assignments_table(report: EvaluationReport) -> Table:
    """A row for each assignment of models to roles, the best first, with its difference from the first one."""
    modes = report.evaluations
    first_assignment = next(iter(report.assignments))
    roles = list(report.assignments[first_assignment])
    has_success = any(mode.success for mode in modes.values())
    measure = "success" if has_success else "reward"
    form = ".1%" if has_success else ".3f"
    differences: dict[str, Interval | None] = {}
    for comparison in report.comparisons:
        if comparison.label in report.assignments:
            differences[comparison.label] = comparison.success if has_success else comparison.reward
    figures = {label: mode.success if has_success else mode.reward for label, mode in modes.items()}

    def score(label: str) -> float:
        figure = figures[label]
        return figure.mean if figure else -math.inf

    title = f"All assignments{_sampled_at(modes.values())}, the best first, 95% intervals over tasks"
    table = grid(*roles, "", f"{measure}>", "n>", f"less {first_assignment}>", "failed>", title=title)
    for label in sorted(modes, key=score, reverse=True):
        figure = figures[label]
        difference = differences.get(label)
        assignment = report.assignments.get(label)
        if assignment:
            players = list(assignment.values())
            kind = kind_of(assignment)
        else:  # today's model, or recorded episodes: one name for all columns of roles
            players = [label, *[""] * (len(roles) - 1)]
            kind = ""
        table.add_row(
            *players,
            kind,
            shown(figure, form),
            str(figure.n) if figure else "",
            shown(difference, f"+{form}") if difference else "",
            str(modes[label].failures),
        )
    return table


def _effects_table(report: EvaluationReport) -> Table:
    """A row for the effect of each model in each role, as the mean over the models of the other roles."""
    title = "One role's model exchanged, mean over the models of the other roles"
    table = grid("role", "model", "instead of", "difference>", "n>", title=title)
    for effect in report.effects:
        form = "+.1%" if effect.of_success else "+.3f"
        table.add_row(
            effect.role, effect.model, effect.against, shown(effect.difference, form), str(effect.difference.n)
        )
    return table


def _sampled_at(modes: Collection[EvaluatedMode]) -> str:
    """Name the temperature of all modes, or the temperature of each mode if they differ."""

    def as_text(temperature: float | str) -> str:
        return "at the application's own temperature" if temperature == "app" else f"at temperature {temperature:g}"

    temperatures = {mode.label: mode.temperature for mode in modes if mode.temperature is not None}
    if not temperatures:
        return ""
    if len(set(temperatures.values())) == 1:
        return f" {as_text(next(iter(temperatures.values())))}"
    by_mode = [f"{label} {as_text(temperature)}" for label, temperature in temperatures.items()]
    return f" ({', '.join(by_mode)})"


def _differences_table(report: EvaluationReport) -> Table:
    figures = _figures_of(report.comparisons)
    table = grid("", *_figure_columns(figures), title="Differences on the same tasks, 95% intervals over n tasks")
    for comparison in report.comparisons:
        table.add_row(f"{comparison.label} - {comparison.against}", *_figure_cells(comparison, figures, "+"))
    return table


def _figures_of(rows: Sequence[EvaluatedMode | Comparison]) -> list[str]:
    """Name the figures of a table: success and reward, and the plain outcome if a row has it."""
    figures = ["success", "reward"]
    if any(row.outcome for row in rows):
        figures.append("outcome")
    return figures


def _figure_columns(figures: Sequence[str]) -> list[str]:
    """Return two columns for each figure: its interval, and its number of tasks."""
    columns: list[str] = []
    for name in figures:
        title = PLAIN_COLUMN if name == "outcome" else name
        columns += [f"{title}>", "n>"]
    return columns


def _figure_cells(row: EvaluatedMode | Comparison, figures: Sequence[str], sign: str = "") -> list[str]:
    """Return the cells of a row for `_figure_columns`; `sign` is `+` for differences."""
    cells: list[str] = []
    for name in figures:
        interval = getattr(row, name)
        form = ".1%" if name == "success" else ".3f"
        cells += [shown(interval, f"{sign}{form}"), str(interval.n) if interval else ""]
    return cells


def _pass_at_table(report: EvaluationReport) -> Table:
    """A row per mode with the chance that one of k episodes succeeds, if tasks were run more than once."""
    all_ks: set[int] = set()
    for mode in report.evaluations.values():
        all_ks.update(mode.pass_at)
    ks = sorted(all_ks)
    title = "At least one of k episodes succeeds, 95% intervals over n tasks"
    table = grid("", *(f"pass@{k}>" for k in ks), "n>", title=title)
    for label, mode in report.evaluations.items():
        if mode.pass_at:
            table.add_row(label, *(shown(mode.pass_at.get(k), ".1%") for k in ks), str(mode.pass_at[ks[0]].n))
    return table


def _roles_table(report: EvaluationReport) -> Table:
    """A row per mode and role. Each reward component of the answers has a column."""
    rows: list[tuple[str, RoleStatistics]] = []
    components: set[str] = set()
    for label, mode in report.evaluations.items():
        for role, statistics in mode.roles.items():
            rows.append((f"{label} {role}", statistics))
            components.update(statistics.rewards)
    some_failed = any(statistics.failed for _, statistics in rows)
    some_cut_off = any(statistics.truncated for _, statistics in rows)
    columns = ["answered by", "calls>", "turns>", "tokens>"]
    if some_failed:
        columns.append("failed>")
    if some_cut_off:
        columns.append("cut off>")
    table = grid("", *columns, *(f"{name}>" for name in sorted(components)), title="Roles, means per call")

    for title, statistics in rows:
        tokens = f"{statistics.prompt_tokens:.0f}+{statistics.completion_tokens:.1f}"
        cells = [str(statistics.calls), f"{statistics.turns:.1f}", tokens]
        if some_failed:
            cells.append(str(statistics.failed))
        if some_cut_off:
            cells.append(f"{statistics.truncated:.1%}")
        for name in sorted(components):
            cells.append(f"{statistics.rewards[name]:.3f}" if name in statistics.rewards else "-")
        table.add_row(title, ", ".join(statistics.policies), *cells)
    return table


def _use_table(report: EvaluationReport) -> Table:
    """A row per mode, and one per comparison for the calls. There is a column of money only if calls have prices."""
    has_cost = any(mode.use.cost is not None for mode in report.evaluations.values())
    columns = ["calls>", "tokens>", "seconds>"]
    if has_cost:
        columns.append("cost>")
    table = grid("", *columns, title="Means per episode")
    for label, mode in report.evaluations.items():
        use = mode.use
        n = max(mode.episodes, 1)
        tokens = f"{use.prompt_tokens / n:.0f}+{use.completion_tokens / n:.0f}"
        cells = [f"{use.calls / n:.1f}", tokens, shown(use.seconds, ".3f")]
        if has_cost:
            cost = "-" if use.cost is None else f"{use.cost / n:.6f}"
            if use.cost is not None and use.unpriced:
                cost += f" ({use.unpriced} calls without a price)"
            cells.append(cost)
        table.add_row(label, *cells)
    for comparison in report.comparisons:
        # Most applications make the same calls in every episode: then there is no row.
        calls = comparison.calls
        if calls is not None and (calls.mean or calls.low or calls.high) and not report.assignments:
            cells = [shown(calls, "+.1f"), *[""] * (len(columns) - 1)]
            table.add_row(f"{comparison.label} - {comparison.against}", *cells)
    return table
