"""`cotune show --html`: writes a run as one HTML file, with figures, curves, and episodes before and after training."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import msgspec

from cotune.integrations.web.viewer.episode import ShownCall, show_calls
from cotune.integrations.web.viewer.evaluations import show_evaluation
from cotune.integrations.web.viewer.rendering import asset, render
from cotune.integrations.web.viewer.viewer import hues
from cotune.reading.by_task import episodes_of_modes
from cotune.reading.curves import charts
from cotune.reading.evaluations import StoredEvaluation, most_telling
from cotune.reading.facts import ending, facts, find_troubles, learned_answers
from cotune.reading.find_runs import open_runs
from cotune.reading.first_page import first_page
from cotune.reading.headline import compared_modes
from cotune.reading.run import OpenedRun
from cotune.reading.use import Totals, total_cost
from cotune.records.prices import Prices
from cotune.records.structs import Episode
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.whole_file import whole_file

EPISODES = 5
"""Most pairs of episodes before and after training."""
FAILED_TASKS = 10
"""Most failed tasks; the worst ones are shown."""
TASKS = 10
"""Most tasks that got worse in an evaluation; the worst ones are shown."""
MOST_CALLS = 8
"""Most calls of an episode."""


class ReportedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode with its first calls. `title` names its step or its policies; `more` calls are not shown."""

    title: str
    episode: Episode
    rewards: dict[str, float]
    calls: list[ShownCall]
    more: int


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two episodes of one task; or, if `task` is empty, a single one."""

    task: str
    before: ReportedEpisode | None
    after: ReportedEpisode | None


def write_report(path: Path | str, out: Path, prices: Prices | None = None) -> None:
    """Write the report of the run or records file at `path` to `out`. Raises RunError if there is none."""
    runs = open_runs([path])
    try:
        page = report(runs[0], prices or {})
        with whole_file(out) as file:
            file.write(page.encode())
    finally:
        for run in runs:
            run.close()


def report(run: OpenedRun, prices: Prices) -> str:
    """The HTML page of the report. It contains its scripts and styles, so that it is a single file."""
    scripts = ("uplot.js", "viewer.js")
    styles = ("uplot.css", "viewer.css")
    # A text in a record must not run as a script. The browser runs only scripts with these hashes.
    content_security_policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = first_page(run, FAILED_TASKS)
    evaluation = page.headline.evaluation or most_telling(run.evaluations)
    lost_tasks = None
    if evaluation:
        lost_tasks = show_evaluation(run, evaluation, kind="lost", size=TASKS)
    episode_pairs, how_chosen = before_and_after(run, evaluation)
    uses = dict(sorted(Totals(run).by_role(prices).items()))
    return render(
        "report.html",
        run=run,
        state=run.state,
        policy=content_security_policy,
        scripts=scripts,
        styles=styles,
        facts=facts(run),
        page=page,
        learned=learned_answers(run),
        evaluated=lost_tasks,
        troubles=find_troubles(run),
        ending=ending(run),
        charts=charts([run]),
        pairs=episode_pairs,
        how=how_chosen,
        uses=uses,
        total=total_cost(uses),
        hues=hues(run),
    )


def before_and_after(run: OpenedRun, evaluation: StoredEvaluation | None) -> tuple[list[Pair], str]:
    """Episodes of the same tasks before and after training, and a sentence that says how they were chosen.

    They are never chosen by their outcome. If no task was tried twice, they are the latest episodes.
    """
    if evaluation is not None and (pairs := _pairs_of_evaluation(run, evaluation)):
        return pairs, f"The same held-out tasks ({evaluation.name}), the first by their ids, whatever their outcome."
    for phase, kind in (("eval", "held-out"), ("train", "training")):
        if repeated := run.figures.repeated_tasks(phase, EPISODES):
            pairs = [_pair_of_steps(run, phase, *row) for row in repeated]
            return pairs, f"The same {kind} tasks in an early and a late step, whatever their outcome."
    latest = run.figures.episode_ids(EpisodeFilters(status="counted"), EPISODES)
    pairs = []
    for id in latest:
        episode = run.store.episode(id)
        step = "" if episode.training_step is None else f", step {episode.training_step + 1}"
        title = f"episode of task {episode.task.id}{step}"
        pairs.append(Pair(task="", before=None, after=_reported_episode(run, id, title)))
    if not run.is_run or not latest:
        return pairs, "The latest episodes."
    return pairs, "No task was tried twice, so there is no before and after. These are the latest episodes."


def _pairs_of_evaluation(run: OpenedRun, evaluation: StoredEvaluation) -> list[Pair]:
    """Episodes of the policies before training and of the trained ones on the same tasks of an evaluation. Empty if
    the evaluation did not run both, or if its records were removed.
    """
    after_mode, before_mode = compared_modes(evaluation) or ("", "")
    records = run.records_of(evaluation)
    modes = evaluation.evaluations
    if records is None or before_mode not in modes:
        return []
    common_tasks = modes[after_mode].endings.keys() & modes[before_mode].endings.keys()
    tasks = sorted(common_tasks)[:EPISODES]
    episode_ids = episodes_of_modes(run, evaluation, tasks)
    pairs = []
    for task in tasks:
        if (task, after_mode) in episode_ids and (task, before_mode) in episode_ids:
            before = _reported_episode(records, episode_ids[task, before_mode], f"before: {before_mode}")
            after = _reported_episode(records, episode_ids[task, after_mode], f"after: {after_mode}")
            pairs.append(Pair(task=task, before=before, after=after))
    return pairs


def _reported_episode(run: OpenedRun, id: str, title: str) -> ReportedEpisode:
    episode = run.store.episode(id)
    calls = show_calls(run, run.store.calls(id, limit=MOST_CALLS), None)
    rewards = dict(run.store.rewards([id])[id])
    more = max(0, episode.calls - len(calls))
    return ReportedEpisode(title=title, episode=episode, rewards=rewards, calls=calls, more=more)


def _pair_of_steps(run: OpenedRun, phase: str, task: str, first: int, last: int) -> Pair:
    """The first episodes of a task in two steps."""
    before_id = run.figures.first_episodes(phase, first, [task])[str(task)]
    after_id = run.figures.first_episodes(phase, last, [task])[str(task)]
    return Pair(
        task=str(task),
        before=_reported_episode(run, before_id, f"before: step {first + 1}"),
        after=_reported_episode(run, after_id, f"after: step {last + 1}"),
    )


def _hash(name: str) -> str:
    digest = hashlib.sha256(asset(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
