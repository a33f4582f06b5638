"""The effect of a change by hand: compares the prompts before and after it on the same tasks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import WorkflowSource, workflow_of
from cotune.errors import RunError
from cotune.prompts.edits import Prompts
from cotune.records.tasks import as_tasks
from cotune.runtime.run_context import RunContext, current_run
from cotune.storage.open_store import open_store
from cotune.storage.run_layout import RunLayout
from cotune.tables import plural
from cotune.terminal import terminal
from cotune.trainer.evaluation.statistics import shown
from cotune.trainer.prompts.evaluations import Evaluations, check_judge
from cotune.trainer.prompts.held_out import HeldOut, compare_held_out
from cotune.trainer.prompts.options import ImproveOptions
from cotune.trainer.prompts.spending import LimitReached, Spending
from cotune.trainer.reporting.progress import episode_bar

MAX_CALLS = 2000
"""Most calls of a comparison. For more tasks use a search, whose limit can be set."""


def compare_prompts(
    workflow: WorkflowSource,
    tasks: str | Path | Iterable[Any],
    before: Prompts,
    after: Prompts,
    folder: Path,
) -> HeldOut | None:
    """Run the application with both prompts on each task, and record the runs in a new `folder`. Returns None if the
    workflow gives no outcome.

    The application's own provider answers. Raises LimitReached after MAX_CALLS calls.
    """
    app = workflow_of(workflow)
    check_judge(app)
    all_tasks = as_tasks(tasks)
    options = ImproveOptions(max_calls=MAX_CALLS)
    console = terminal(stderr=True)
    console.print(f"comparing the prompts before and after on {plural(len(all_tasks), 'task')}, once each ...")
    folder.mkdir(parents=True, exist_ok=True)
    current_run.set(RunContext(folder=folder))
    with open_store(RunLayout(folder).records) as store, episode_bar(console, 2 * len(all_tasks)) as bar:
        spending = Spending(MAX_CALLS, max_cost=None, prices={})
        evaluations = Evaluations(app, store, responder=None, options=options, spending=spending, on_episode=bar)
        try:
            comparison = run_sync(compare_held_out(evaluations, before, after, all_tasks))
        except LimitReached as error:
            raise LimitReached(error.cause, "Pass a file with fewer tasks: each is run twice.") from None
        except RunError as error:
            raise RunError(error.cause, "Edit the part again once the models can be reached.") from None
    for name, first in evaluations.errors.items():
        console.print(f"{name} {evaluations.counts[name]}, the first: {first}", markup=False, highlight=False)
    return comparison


def result_sentence(held_out: HeldOut) -> str:
    """Return the result in one sentence."""
    verdict = "not shown to be better or worse" if held_out.verdict == "not shown" else held_out.verdict
    difference = shown(held_out.difference, "+.3f")
    text = f"{verdict}: {held_out.base:.3f} before, {held_out.best:.3f} after, difference {difference}"
    text += f" on {plural(held_out.tasks, 'task')} ({held_out.level:.0%})"
    if held_out.unmatched:
        text += f"; {plural(held_out.unmatched, 'call')} did not have the old text"
    if held_out.unknown:
        text += f"; {plural(held_out.unknown, 'task')} left out without an outcome"
    return text
