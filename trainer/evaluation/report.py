"""What `cotune eval` shows and writes: evaluations side by side, compared on the same tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cotune.intervals import Interval
from cotune.reading.evaluations import Comparison, EvaluatedMode, EvaluationReport
from cotune.reading.headline import PLAIN_COLUMN
from cotune.sampling.responder import PolicyResponder
from cotune.tables import grid
from cotune.trainer.evaluation.run import share_floor
from cotune.trainer.evaluation.statistics import paired_difference, paired_shares
from cotune.trainer.evaluation.verdict import tasks_for_share, verdict_on_reward, verdict_on_success

SHOWN = 3
"""Reasons of failure shown for each evaluation."""
OPPOSED = (
    "nothing to compare between {} and {}: the rewards of {roles} add up to the same in every episode, so one role's "
    "gain is another's loss"
)


def compare(after: EvaluatedMode, before: EvaluatedMode) -> Comparison:
    """Paired differences of success and rewards over the shared tasks. The verdict is on success where it is told, else
    on the trained reward, or the plain outcome where one of both has none; it names failures that differ.

    Nothing is compared where one role's gain is another's loss.
    """
    after, before = share_floor([after, before])
    names = (after.label, before.label)
    if roles := after.opposed or before.opposed:
        return Comparison(
            label=after.label,
            against=before.label,
            success=None,
            reward=None,
            verdict=OPPOSED.format(*names, roles=", ".join(roles)),
        )
    success = paired_shares(after.successes, before.successes)
    reward = paired_difference(after.rewards, before.rewards)
    outcome = paired_difference(after.outcomes, before.outcomes)
    told = reward or outcome
    if success is not None:
        verdict = verdict_on_success(*names, success, tasks_for_share(after.successes, before.successes))
    elif told is not None:
        verdict = verdict_on_reward(*names, told)
    else:
        verdict = f"nothing to compare between {after.label} and {before.label}: no task ended with a reward in both"
    return Comparison(
        label=after.label,
        against=before.label,
        success=success,
        reward=reward,
        outcome=outcome if after.outcome or before.outcome else None,
        verdict=verdict + _failures_differ(after, before),
    )


def _failures_differ(after: EvaluatedMode, before: EvaluatedMode) -> str:
    """How many episodes of each side failed, where the shares differ."""
    failed, other = sum(after.failed.values()), sum(before.failed.values())
    if failed * before.episodes == other * after.episodes:
        return ""
    return (
        f"; failed episodes: {failed} of {after.episodes} of {after.label}, {other} of {before.episodes} of "
        f"{before.label}"
    )


def remarks(evaluations: Mapping[str, EvaluatedMode], responder: PolicyResponder) -> Iterator[str]:
    """What to know beside the figures: modes in which all failed, what is not reported, and the roles that no policy of
    `responder` played."""
    for label, found in evaluations.items():
        if cause := found.all_failed:
            yield f"All {found.episodes} episodes of {label} failed, most often of: {cause}"
    sound = [found for found in evaluations.values() if found.all_failed is None]
    if sound and all(found.success is None for found in sound):
        yield "No success rate: the workflow returns no `success`, so only its reward is reported."
    played = [found for label, found in evaluations.items() if label != "today"]
    yield from _role_remarks(played, responder)
    for label, found in evaluations.items():
        if found.use.uncounted:
            yield f"{label}: {found.use.uncounted} of {found.use.calls} calls report no tokens, and count as none."


def _role_remarks(played: Collection[EvaluatedMode], responder: PolicyResponder) -> Iterator[str]:
    seen = {role for found in played for role in found.roles}
    if any(found.all_failed is None for found in played):
        for role in sorted(set(responder.policies) - seen):
            yield f"Role {role!r} made no call."
    for role in sorted(seen & set(responder.provider_roles)):
        yield f"Role {role!r} was left to the application's own provider."
    who = "the application's own provider" if responder.others is None else "the untrained model"
    for role in sorted({role for found in played for role in found.unlisted}):
        calls = sum(found.unlisted.get(role, 0) for found in played)
        yield f"Role {role!r} has no policy: {who} answered its {calls} calls (other_roles)."


def render(report: EvaluationReport) -> Group:
    """Tables for a terminal: results, differences, roles, what episodes take; then failures, notes and verdicts."""
    tables = [_results(report), *_pass_at(report), _roles(report), _use(report)]
    if report.comparisons:
        tables.insert(1, _differences(report))
    parts: list[Any] = [part for table in tables for part in (table, "")]
    for label, evaluation in report.evaluations.items():
        counts = {**evaluation.failed, **{f"scorer: {why}": n for why, n in evaluation.scorer_errors.items()}}
        parts.extend(Text(line, style="red") for line in _failures(label, counts))
    parts.extend(Text(note) for note in report.notes)
    parts.extend(Text(c.verdict, style="bold") for c in report.comparisons)
    parts.extend(Text(line, style="bold") for line in bill(report))
    return Group(*parts)


def bill(report: EvaluationReport) -> Iterator[str]:
    """For each evaluation whose calls all have a price, what it reaches and what that costs."""
    for label, e in report.evaluations.items():
        if e.use.cost is None or e.use.unpriced or e.use.uncounted:
            continue
        reached = f"success {_percent(e.success)}" if e.success else f"reward {_number(e.reward)}"
        yield f"{label}: {reached} at {1000 * e.use.cost / max(e.episodes, 1):.4g} per 1,000 tasks"


def _failures(label: str, counts: dict[str, int]) -> list[str]:
    """The most frequent reasons, and how many episodes or scores the others cost."""
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    lines = [f"{label}: {n} x {why}" for why, n in ranked[:SHOWN]]
    if rest := ranked[SHOWN:]:
        lines.append(f"{label}: {sum(n for _, n in rest)} more, for {len(rest)} other reasons")
    return lines


def _results(report: EvaluationReport) -> Table:
    plain = any(e.outcome for e in report.evaluations.values())
    outcome = [f"{PLAIN_COLUMN}>", "n>"] if plain else []
    columns = ("success>", "n>", "reward>", "n>", *outcome, "episodes>", "failed>", "seconds>")
    table = grid("", *columns, title="Results, 95% intervals over n tasks")
    for label, e in report.evaluations.items():
        found = [_percent(e.success), _n(e.success), _number(e.reward), _n(e.reward)]
        found += [_number(e.outcome), _n(e.outcome)] if plain else []
        table.add_row(label, *found, str(e.episodes), str(sum(e.failed.values())), f"{e.seconds:.1f}")
    return table


def _pass_at(report: EvaluationReport) -> list[Table]:
    """How often one of k episodes succeeds, where tasks were run more than once."""
    ks = sorted({k for e in report.evaluations.values() for k in e.pass_at})
    if not ks:
        return []
    title = "At least one of k episodes succeeds, 95% intervals over n tasks"
    table = grid("", *(f"pass@{k}>" for k in ks), "n>", title=title)
    for label, e in report.evaluations.items():
        if e.pass_at:
            table.add_row(label, *(_percent(e.pass_at.get(k)) for k in ks), _n(e.pass_at[ks[0]]))
    return [table]


def _differences(report: EvaluationReport) -> Table:
    plain = any(c.outcome for c in report.comparisons)
    title = "Differences on the same tasks, 95% intervals over n tasks"
    table = grid("", "success>", "n>", "reward>", "n>", *([f"{PLAIN_COLUMN}>", "n>"] if plain else []), title=title)
    for c in report.comparisons:
        found = [_percent(c.success, "+"), _n(c.success), _number(c.reward, "+"), _n(c.reward)]
        found += [_number(c.outcome, "+"), _n(c.outcome)] if plain else []
        table.add_row(f"{c.label} - {c.against}", *found)
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
        cells += [str(r.failed)] * failed + [f"{100 * r.truncated:.1f}%"] * cut
        cells += [f"{r.rewards[name]:.3f}" if name in r.rewards else "-" for name in components]
        table.add_row(f"{label} {role}", ", ".join(r.policies), *cells)
    return table


def _use(report: EvaluationReport) -> Table:
    """A row per mode; money only where prices were given."""
    cost = any(e.use.cost is not None for e in report.evaluations.values())
    columns = ["calls>", "tokens>", "seconds>", *(["cost>"] if cost else [])]
    table = grid("", *columns, title="Means per episode")
    for label, e in report.evaluations.items():
        n = max(e.episodes, 1)
        tokens = f"{e.use.prompt_tokens / n:.0f}+{e.use.completion_tokens / n:.0f}"
        money = "-" if e.use.cost is None else f"{e.use.cost / n:.6f}"
        if e.use.cost is not None and e.use.unpriced:
            money += f" ({e.use.unpriced} calls without a price)"
        table.add_row(label, f"{e.use.calls / n:.1f}", tokens, _number(e.use.seconds), *([money] if cost else []))
    return table


def _n(found: Interval | None) -> str:
    """The number of tasks that a figure is of."""
    return str(found.n) if found else ""


def _percent(interval: Interval | None, sign: str = "") -> str:
    return _interval(interval, 100, f"{sign}.1f", "%")


def _number(interval: Interval | None, sign: str = "") -> str:
    return _interval(interval, 1, f"{sign}.3f")


def _interval(found: Interval | None, scale: float, form: str, unit: str = "") -> str:
    if found is None:
        return "-"
    text = f"{scale * found.mean:{form}}{unit}"
    if found.low is None or found.high is None:
        return text
    return f"{text} [{scale * found.low:{form}}, {scale * found.high:{form}}]"
