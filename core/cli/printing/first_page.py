"""The first page of a run in the terminal: verdict, before and after, failed tasks."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from cotune.reading.failed_tasks import FailedTask
from cotune.reading.first_page import FirstPage
from cotune.reading.words import change_text
from cotune.tables import BAD, NAME, QUIET, figure, plural, snippet

FAILED_TASKS = 5
"""Maximum number of failed tasks that are shown."""


def first_page_parts(page: FirstPage) -> Iterator[RenderableType]:
    """The first page of a run to print: the verdict, the changes of figures, then the failed tasks."""
    evaluation = page.headline.evaluation
    source = f" ({evaluation.name})" if evaluation is not None and page.headline.verdict else ""
    yield Text.assemble((page.verdict, "bold"), (source, QUIET))
    if page.command:
        yield Text.assemble(("compare: ", QUIET), page.command)
    for change in page.headline.changes:
        yield Text(change_text(change), style=QUIET if change.kind == "selected" else "")
    yield ""
    failed = page.failed
    if failed is None or not failed.total:
        yield Text(page.none_failed, style=QUIET)
        return
    shown = f", {len(failed.tasks)} shown" if len(failed.tasks) < failed.total else ""
    counts = f" ({failed.source}: {failed.total:,} of {plural(failed.known, 'task')}{shown})"
    yield Text.assemble((failed.title, "bold"), (counts, QUIET))
    for task in failed.tasks:
        yield from _failed_task(task)


def _failed_task(task: FailedTask) -> Iterator[Text]:
    """The lines of one failed task: how it failed, then one line each for question, answer, expected answer
    and error.
    """
    head = Text.assemble((task.task, NAME))
    if task.runs > 1 and task.success is not None:
        head.append(f"  solved in {figure(task.success, True)} of {task.runs} runs", style=QUIET)
    elif task.reward is not None:
        head.append(f"  reward {figure(task.reward)}", style=QUIET)
    yield _one_line(head)
    lines = (
        ("asked", task.exchange.question, ""),
        ("answered", task.exchange.answer, ""),
        ("expected", task.exchange.expected, ""),
        ("error", task.error, BAD),
    )
    for name, text, style in lines:
        if text:
            yield _one_line(Text.assemble((f"  {name:<8} ", QUIET), (snippet(text), style)))


def _one_line(text: Text) -> Text:
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text
