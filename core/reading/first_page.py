"""The first page of every kind of run: its verdict, its figures before and after, and the tasks that it failed.

`cotune show`, `cotune show --html` and the overview of `cotune view` all show this page first.
"""

from __future__ import annotations

import shlex

import msgspec

from cotune.reading.failed_tasks import FailedTasks, failed_tasks
from cotune.reading.headline import Headline
from cotune.reading.run import OpenedRun
from cotune.tables import plural


class FirstPage(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the first page. `verdict` is never empty: if a run was not compared, it says so, and `command` is
    the command that compares it. `failed` is None if the episodes have no results of tasks. `none_failed` is a sentence
    if no failed task is listed."""

    verdict: str
    command: str
    headline: Headline
    failed: FailedTasks | None
    none_failed: str


def first_page(run: OpenedRun, most: int) -> FirstPage:
    """The first page of a run, with the `most` worst of its failed tasks."""
    headline = run.headline  # read once: in a large store it takes a second
    failed = failed_tasks(run, headline, most)
    verdict = headline.verdict
    command = ""
    if not verdict:
        verdict, command = _without_comparison(run, failed)
    none_failed = ""
    if failed is None and not run.samples:
        none_failed = "No failed tasks: this run ran none."
    elif failed is None:
        none_failed = "No outcome of any task is known."
    elif not failed.total and failed.measure == "success":
        none_failed = f"No task failed: {plural(failed.known, 'task')} ({failed.source})."
    elif not failed.total:
        none_failed = f"All tasks have the same reward: {plural(failed.known, 'task')} ({failed.source})."
    return FirstPage(verdict=verdict, command=command, headline=headline, failed=failed, none_failed=none_failed)


def _without_comparison(run: OpenedRun, failed: FailedTasks | None) -> tuple[str, str]:
    """The reason why a run has no verdict, and the command that gives it one."""
    if not run.is_run:
        if failed is None or failed.measure != "success":
            return "no verdict: there is nothing to compare these episodes with", ""
        solved = failed.known - failed.total
        return f"{solved:,} of {plural(failed.known, 'task')} solved; there is nothing to compare them with", ""
    if run.state == "under way":
        return "no verdict yet: the run is under way", ""
    workflow = str(run.description.get("workflow") or "WORKFLOW")
    command = f"cotune eval {shlex.quote(workflow)} --tasks held_out.jsonl --run {shlex.quote(str(run.path))}"
    if run.samples:
        return "no verdict: the trained policies were not compared with the base on held-out tasks", command
    return "no verdict: the run learned from recorded answers and was not tried on held-out tasks", command
