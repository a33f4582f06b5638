"""The result of a search: the file of prompts with its provenance, and the report."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from cotune.integrations.versions import versions_of_installed
from cotune.prompts.edits import Prompts
from cotune.prompts.wording import Wording
from cotune.storage.judge_ledger import totals_of
from cotune.tables import BAD, GOOD, cells, grid, plural
from cotune.trainer.evaluation.statistics import shown
from cotune.trainer.prompts.held_out import HeldOut, Verdict
from cotune.trainer.prompts.improved_parts import IMPROVED
from cotune.trainer.prompts.options import PromptRun
from cotune.trainer.prompts.problem import PromptProblem
from cotune.trainer.run.run_folder import write_atomically

_COUNTED = {
    "repeated": "runs began with calls from the record",
    "diverged": "runs asked something else than the record has, and ran whole",
    "retried": "runs failed by the models' infrastructure, and were begun again",
    "unmatched": "calls went out without the edits of their role",
    "unscored": "candidates were not scored, as calls went out without their edits",
    "scorer_errors": "answers got no reward, as their scorer failed",
    "judge_errors": "runs got no outcome, as their judge failed",
}
"""The counts of a search in addition to runs and calls, in words."""
_REFUSED = {
    "lost_slot": "lost or repeated a slot",
    "same": "said what the prompt says now",
    "too_long": "were too long",
    "copies_task": "quoted a task or a run",
    "new_address": "named a new address",
    "unknown_name": "named an unknown tool or field",
    "invisible": "had characters that nobody sees",
    "not_called": "had no run to be shown",
    "no_answer": "got no answer of the reflection model",
    "unfenced": "had no whole <new-text>...</new-text>: look whether the answers are cut off",
    "quotes_mark": "quoted a mark of data",
}
"""Why proposals are refused."""


class ImproveReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `improve`. `verdict` is on the held-out tasks."""

    path: str
    prompts: Prompts
    verdict: Verdict
    held_out: HeldOut | None
    validation: tuple[float, float]
    """Mean score on the tasks to choose by, of the prompts before and of the best."""
    candidates: int
    spending: dict[str, Any]
    refused: dict[str, int]
    counts: dict[str, int]
    errors: dict[str, str] = {}
    """The first error of scorers, and of the judge, by the name of the count."""
    blame: str
    """Which role was changed, and why."""
    taken: dict[str, int]
    ended: str = ""
    """The reason if the search ended before its last round, else empty."""
    notes: tuple[str, ...] = ()


def make_report(
    problem: PromptProblem,
    blame: str,
    held_out: HeldOut | None,
    ended: str,
    notes: tuple[str, ...],
    folder: PromptRun,
) -> ImproveReport:
    """Return the report, with the prompts to write."""
    best = problem.best()
    first = problem.pool[0]
    verdict: Verdict = "not shown" if held_out is None else held_out.verdict
    options = problem.evaluations.options
    spending = problem.evaluations.spending
    counts = dict(problem.evaluations.counts)
    if problem.unscored:
        counts["unscored"] = problem.unscored
    versions = versions_of_installed(("cotune", "gepa"))
    prompts = msgspec.structs.replace(
        problem.prompts(best.texts),
        workflow=problem.evaluations.workflow.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        cotune=str(versions.get("cotune", "")),
        provenance={
            "made_by": "cotune prompts improve",
            "reflection": {"model": options.reflection, "requests": problem.reflection.asked},
            "spent": spending.to_json(),
            "candidates": len(problem.pool),
            "rounds": problem.rounds,
            "refused": dict(problem.refused),
            "counts": counts,
            "blame": blame,
            "seed": options.seed,
            "gepa": versions.get("gepa"),
            "started_from": problem.base.id,
            IMPROVED: problem.base.provenance.get(IMPROVED, []),
        },
        evaluation={
            "verdict": verdict,
            "held_out": None if held_out is None else held_out.to_json(),
            "validation": {"base": first.score, "best": best.score, "tasks": len(first.scores)},
        },
    )
    return ImproveReport(
        path=str(folder.path),
        prompts=prompts,
        verdict=verdict,
        held_out=held_out,
        validation=(first.score, best.score),
        candidates=len(problem.pool) - 1,
        spending=dict(spending.to_json()),
        refused=dict(problem.refused),
        counts=counts,
        errors=dict(problem.evaluations.errors),
        blame=blame,
        taken=dict(problem.turns.taken),
        ended=ended,
        notes=tuple(note for note in (*notes, spending.unpriced, _judges_text(folder)) if note),
    )


def _judges_text(folder: PromptRun) -> str:
    """Describe the requests of judges, which have separate limits; empty without any."""
    total = totals_of(folder.path)
    if not total.get("requests"):
        return ""
    return f"judges, in addition: {plural(int(total['requests']), 'request')}, {total['cost']:.4g} of money"


def write_candidates(folder: PromptRun, problem: PromptProblem) -> None:
    """Write the pool of a search, each candidate with its texts and scores."""
    pool: list[dict[str, Any]] = []
    for candidate in problem.pool:
        pool.append(
            {
                "texts": dict(candidate.texts),
                "score": candidate.score,
                "scores": dict(candidate.scores),
                "made_of": candidate.parent,
            }
        )
    write_atomically(folder.candidates, json.dumps(pool, indent=2, ensure_ascii=False).encode())


def render(report: ImproveReport) -> Group:
    """Render the report for a terminal."""
    # 1. The changed parts, each as the old lines and the new ones.
    lines: list[RenderableType] = []
    wording = Wording(report.prompts.parts)
    for part in report.prompts.parts:
        if part.new is not None:
            lines.append(Text(f"\n{part.name}: {part.old.constant} -> {part.new.constant} characters", style="bold"))
            lines += [Text(f"- {line}", style=BAD) for line in wording.text(part.old).splitlines()]
            lines += [Text(f"+ {line}", style=GOOD) for line in wording.text(part.new).splitlines()]

    # 2. The calls and tokens that the search took.
    table = grid("role", "calls>", "prompt tokens>", "answer tokens>", "cost>", title="\nspent")
    for role, spent in report.spending.items():
        cost = f"{spent['cost']:.4g}" if spent["cost"] else "-"
        table.add_row(role, *cells((spent["calls"], spent["prompt_tokens"], spent["completion_tokens"], cost)))
    lines.append(table)

    # 3. The choice of roles, counts and notes, and the verdict.
    role_text = f"\nwhich role: {report.blame}"
    if report.taken:
        turns = ", ".join(f"{name} {count}" for name, count in report.taken.items())
        role_text += f" Turns: {turns}."
    lines.append(Text(role_text))
    if report.refused:
        refused = "; ".join(f"{count} {_REFUSED.get(rule, rule)}" for rule, count in report.refused.items())
        lines.append(Text(f"proposals refused: {refused}"))
    lines += [Text(f"{name}: {count} {_COUNTED[name]}") for name, count in report.counts.items() if count]
    lines += [Text(f"first of {name}: {text}") for name, text in report.errors.items()]
    lines += [Text(text) for text in (*report.notes, report.ended) if text]
    lines += [Text(""), Text(verdict_text(report), style=GOOD if report.verdict == "better" else "bold")]
    return Group(*lines)


def verdict_text(report: ImproveReport) -> str:
    """The verdict of a search for prompts in one or two sentences: whether the new prompts are better on held-out
    tasks.

    The tasks by which candidates were chosen prove nothing, as the best of many candidates is lucky there.
    """
    before, after = report.validation
    luck = (
        f"On the tasks to choose by the score went from {before:.3f} to {after:.3f}, which says little: the best of "
        f"{plural(report.candidates, 'candidate')} is mostly luck."
    )
    held_out = report.held_out
    if held_out is None:
        if not any(part.edited for part in report.prompts.parts) or before == after:
            return "No better prompts were found."
        return f"Not shown: there is no comparison on the held-out tasks. {luck}"
    difference = shown(held_out.difference, "+.3f")
    figures = (
        f"{held_out.base:.3f} before, {held_out.best:.3f} after, difference {difference} on {held_out.tasks} tasks"
    )
    level = "95%"
    if held_out.asked > 1:
        level = f"{100 * held_out.level:.1f}%, as {held_out.asked} candidates were asked about"
    words = {"better": "The new prompts are better", "worse": "The new prompts are worse", "not shown": "Not shown"}
    tokens = f"Tokens of prompts a run: {held_out.prompt_tokens[0]:.0f} -> {held_out.prompt_tokens[1]:.0f}."
    left_out = f" Left out: {plural(held_out.unknown, 'task')} without a known outcome." if held_out.unknown else ""
    return f"{words[report.verdict]} on held-out tasks: {figures} ({level}).{left_out} {tokens}"
