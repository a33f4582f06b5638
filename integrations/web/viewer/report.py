"""`cotune report`: a run as one HTML file, to send to somebody: figures, curves, episodes before and after."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import msgspec

from cotune.integrations.web.viewer import episode as episodes_of
from cotune.integrations.web.viewer.curves import charts
from cotune.integrations.web.viewer.episode import ShownCall
from cotune.integrations.web.viewer.evaluations import chosen, episodes_of_modes, show_evaluation
from cotune.integrations.web.viewer.opened import OpenedRun, open_runs
from cotune.integrations.web.viewer.overview import (
    Prices,
    Totals,
    ending,
    facts,
    learned,
    prices_of,
    total_cost,
    troubles,
)
from cotune.integrations.web.viewer.queries import roles
from cotune.integrations.web.viewer.rendering import asset, hues, render
from cotune.reading.evaluations import StoredEvaluation
from cotune.reading.headline import compared_modes
from cotune.records.structs import Episode
from cotune.storage.episode_filters import COUNTED
from cotune.storage.whole_file import whole_file

EPISODES = 5
TASKS = 10
"""Tasks of an evaluation that are shown, the worst ones."""
MOST_CALLS = 8
"""Calls of an episode that are shown."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """An episode of the report. `title` says when it was, or by which policies."""

    title: str
    episode: Episode
    rewards: dict[str, float]
    calls: list[ShownCall]
    more: int


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two episodes of one task beside each other; or, where `task` is empty, one by itself."""

    task: str
    before: Told | None
    after: Told | None


def write_report(path: Path | str, out: Path, prices: Prices | None = None) -> None:
    """Write the report of the run or records file at `path` to `out`. Raises RunError when there is nothing there."""
    runs = open_runs([path])
    try:
        page = report(runs[0], prices or {})
        with whole_file(out) as file:
            file.write(page.encode())
    finally:
        for run in runs:
            run.close()


def report(run: OpenedRun, prices: Prices) -> str:
    """The page. Its scripts and styles are in it, and named by their hashes: a browser runs nothing else of it."""
    scripts, styles = ("uplot.js", "viewer.js"), ("uplot.css", "viewer.css")
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    found = run.headline
    evaluation = found.evaluation or chosen(run.evaluations, "")
    pairs, how = before_and_after(run, evaluation)
    uses = Totals(run).by_role(prices_of(run, prices))
    return render(
        "report.html",
        run=run,
        state=run.state,
        policy=policy,
        scripts=scripts,
        styles=styles,
        facts=facts(run),
        headline=found,
        learned=learned(run),
        evaluated=show_evaluation(run, evaluation, size=TASKS) if evaluation else None,
        troubles=troubles(run),
        ending=ending(run),
        charts=charts([run]),
        pairs=pairs,
        how=how,
        uses=uses,
        total=total_cost(uses),
        hues=hues(roles(run)),
    )


def before_and_after(run: OpenedRun, evaluation: StoredEvaluation | None) -> tuple[list[Pair], str]:
    """Episodes of the same tasks before and after the training, and a sentence on how they were chosen; never by their
    outcome. Where no task was tried twice, the latest episodes."""
    if evaluation is not None and (pairs := _evaluated(run, evaluation)):
        return pairs, f"The same held-out tasks ({evaluation.name}), the first by their ids, whatever came of them."
    for phase, what in (("eval", "held-out"), ("train", "training")):
        sql = f"""SELECT task, min(training_step), max(training_step) FROM episodes
                 WHERE phase = ? AND {COUNTED} AND training_step >= 0
                 GROUP BY task HAVING min(training_step) < max(training_step)
                 ORDER BY max(training_step) - min(training_step) DESC, task LIMIT ?"""
        if found := run.rows(sql, (phase, EPISODES)):
            pairs = [_of_steps(run, phase, *row) for row in found]
            return pairs, f"The same {what} tasks in an early and a late step, whatever came of them."
    latest = run.rows(f"SELECT id FROM episodes WHERE {COUNTED} ORDER BY id DESC LIMIT ?", (EPISODES,))
    pairs = [Pair(task="", before=None, after=_told(run, id, "episode")) for (id,) in latest]
    if not run.is_run or not latest:
        return pairs, "The latest episodes."
    return pairs, "No task was tried twice, so there is no before and after. These are the latest episodes."


def _evaluated(run: OpenedRun, evaluation: StoredEvaluation) -> list[Pair]:
    """Base and trained on the same tasks, as far as an evaluation kept their episodes."""
    label, against = compared_modes(evaluation) or ("", "")
    records, modes = run.records_of(evaluation), evaluation.evaluations
    if records is None or against not in modes:
        return []
    tasks = sorted(modes[label].endings.keys() & modes[against].endings.keys())[:EPISODES]
    found = episodes_of_modes(run, evaluation, tasks)
    return [
        Pair(
            task=task,
            before=_told(records, found[task, against], f"before: {against}"),
            after=_told(records, found[task, label], f"after: {label}"),
        )
        for task in tasks
        if {(task, label), (task, against)} <= found.keys()
    ]


def _of_steps(run: OpenedRun, phase: str, task: str, first: int, last: int) -> Pair:
    sql = f"SELECT min(id) FROM episodes WHERE phase = ? AND task = ? AND training_step = ? AND {COUNTED}"
    ids = [run.rows(sql, (phase, task, step))[0][0] for step in (first, last)]
    before, after = (
        _told(run, id, f"{when}: step {step + 1}")
        for id, when, step in zip(ids, ("before", "after"), (first, last), strict=True)
    )
    return Pair(task=str(task), before=before, after=after)


def _told(run: OpenedRun, id: str, title: str) -> Told:
    assert run.store is not None
    found = run.store.episode(id)
    calls, _ = episodes_of.page_of_calls(run, id, 0)
    steps = {call.id: call.step for call in calls}
    shown = episodes_of.show_calls(run, calls[:MOST_CALLS], steps, None)
    more = max(0, found.calls - len(shown))
    return Told(title=title, episode=found, rewards=dict(run.store.rewards([id])[id]), calls=shown, more=more)


def _hash(name: str) -> str:
    digest = hashlib.sha256(asset(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
