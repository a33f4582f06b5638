"""What `cotune eval` shows and writes: evaluations side by side, compared on the same tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cotune.trainer.evaluation import Evaluation
from cotune.trainer.statistics import Interval, paired_difference, paired_shares

if TYPE_CHECKING:
    from rich.console import Group


SHOWN = 3
"""Reasons of failure shown for each evaluation."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation minus another, over the tasks that both ran."""

    label: str
    against: str
    success: Interval | None
    """Newcombe's interval for paired shares."""
    reward: Interval | None
    """Paired Student's t interval."""


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluations by mode, their comparisons, and what was left out and why."""

    evaluations: dict[str, Evaluation]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON values, without the endings of single tasks."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        for evaluation in plain["evaluations"].values():
            del evaluation["endings"]
        return plain


def compare(after: Evaluation, before: Evaluation) -> Comparison:
    """Paired differences of success and reward over the shared tasks."""
    return Comparison(
        label=after.label,
        against=before.label,
        success=paired_shares(after.successes, before.successes),
        reward=paired_difference(after.rewards, before.rewards),
    )


def render(report: EvaluationReport) -> Group:
    """Tables for a terminal: results, differences, roles; then failures and notes."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_results(report), _roles(report)]
    if report.comparisons:
        parts.insert(1, _differences(report))
    for label, evaluation in report.evaluations.items():
        counts = {**evaluation.failed, **{f"scorer: {why}": n for why, n in evaluation.scorer_errors.items()}}
        parts.extend(Text(line, style="red") for line in _failures(label, counts))
    parts.extend(Text(note) for note in report.notes)
    return Group(*parts)


def _failures(label: str, counts: dict[str, int]) -> list[str]:
    """The most frequent reasons, and how many episodes or scores the others cost."""
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    lines = [f"{label}: {n} x {why}" for why, n in ranked[:SHOWN]]
    if rest := ranked[SHOWN:]:
        lines.append(f"{label}: {sum(n for _, n in rest)} more, for {len(rest)} other reasons")
    return lines


def _results(report: EvaluationReport) -> Any:
    table = _table("Results, 95% intervals", "", "success", "reward", "episodes", "failed", "seconds")
    for label, e in report.evaluations.items():
        cells = (_percent(e.success), _number(e.reward), str(e.episodes), str(sum(e.failed.values())))
        table.add_row(label, *cells, f"{e.seconds:.1f}")
    return table


def _differences(report: EvaluationReport) -> Any:
    table = _table("Differences on the same tasks, 95% intervals", "", "success", "reward", "tasks")
    for c in report.comparisons:
        shared = c.success or c.reward
        cells = (_percent(c.success, "+"), _number(c.reward, "+"), str(shared.n if shared else 0))
        table.add_row(f"{c.label} - {c.against}", *cells)
    return table


def _roles(report: EvaluationReport) -> Any:
    """A row per mode and role; its reward components are columns of their own."""
    rows = [(label, role, r) for label, e in report.evaluations.items() for role, r in e.roles.items()]
    components = sorted({name for _, _, r in rows for name in r.rewards})
    failed, cut = any(r.failed for _, _, r in rows), any(r.truncated for _, _, r in rows)
    optional = [*(["failed"] if failed else []), *(["cut off"] if cut else [])]
    table = _table("Roles, means per call", "", "answered by", "calls", "turns", "tokens", *optional, *components)
    for label, role, r in rows:
        cells = [str(r.calls), f"{r.turns:.1f}", f"{r.prompt_tokens:.0f}+{r.completion_tokens:.1f}"]
        cells += [str(r.failed)] * failed + [f"{100 * r.truncated:.1f}%"] * cut
        cells += [f"{r.rewards[name]:.3f}" if name in r.rewards else "-" for name in components]
        table.add_row(f"{label} {role}", ", ".join(r.policies), *cells)
    return table


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "answered by") else "right")
    return table


def _percent(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "-"
    text = f"{100 * interval.mean:{sign}.1f}%"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{100 * interval.low:{sign}.1f}, {100 * interval.high:{sign}.1f}]"


def _number(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "-"
    text = f"{interval.mean:{sign}.3f}"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"
