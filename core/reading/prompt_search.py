"""The result of a search for prompts: the prompts before and the best ones, on the same held-out tasks.

`cotune prompts improve` and `cotune prompts edit --tasks` write the comparison into prompts.json, next to the records
of its episodes. The records hold the episodes of both prompts, so a mean over them has no meaning.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cotune.intervals import LEVEL, Interval
from cotune.reading.headline import Change, Headline
from cotune.reading.task_sets import held_out_set
from cotune.storage.typed_json import read_if_typed
from cotune.tables import figure, plural

PHASES = "prompts"
"""The beginning of the names of a search's phases."""
HELD_OUT_PHASE = "prompts-held-out"
"""The phase in which a search compares its best prompts with the prompts before."""
_PROMPTS = "prompts.json"
_SEARCH = "improve.json"


class _HeldOut(msgspec.Struct):
    tasks: int
    base: float
    best: float
    difference: tuple[float | None, float, float | None]
    level: float = LEVEL


class _Evaluation(msgspec.Struct):
    held_out: _HeldOut | None = None
    records: str = ""


class _PromptsFile(msgspec.Struct):
    id: str = ""
    evaluation: _Evaluation = msgspec.field(default_factory=_Evaluation)


class _HeldOutTasks(msgspec.Struct):
    tasks: str = ""


class _Options(msgspec.Struct):
    evaluation: _HeldOutTasks = msgspec.field(default_factory=_HeldOutTasks)


class _Search(msgspec.Struct):
    tasks: str = ""
    options: _Options = msgspec.field(default_factory=_Options)


def search_headline(folder: Path | None) -> Headline:
    """The comparison of a search in a folder, and its verdict. Without a comparison, the verdict says so."""
    prompts = _prompts_of(folder)
    if folder is None or prompts is None or prompts.evaluation.held_out is None:
        return Headline(verdict="no comparison of prompts on held-out tasks is stored here")
    search = read_if_typed(folder / _SEARCH, _Search) or _Search()
    held_out = prompts.evaluation.held_out
    low, mean, high = held_out.difference
    change = Change(
        name="held-out outcome",
        kind="held_out",
        what="mean outcome on held-out tasks that the search has not seen, one run each",
        tasks=held_out_set(search.options.evaluation.tasks, search.tasks),
        first=Interval(mean=held_out.base, n=held_out.tasks),
        first_of="prompts before",
        last=Interval(mean=held_out.best, n=held_out.tasks),
        last_of="best prompts",
        difference=Interval(mean=mean, low=low, high=high, n=held_out.tasks),
    )
    return Headline(changes=(change,), verdict=_verdict(held_out))


def best_prompts(folder: Path | None) -> str | None:
    """The id of the best prompts of a search in a folder: empty for the application's prompts, None if unknown."""
    prompts = _prompts_of(folder)
    return None if prompts is None else prompts.id


def _prompts_of(folder: Path | None) -> _PromptsFile | None:
    """The prompts file of a search for better prompts, or of a comparison by `cotune prompts edit`."""
    if folder is None:
        return None
    prompts = read_if_typed(folder / _PROMPTS, _PromptsFile)
    if prompts is not None:
        return prompts
    # `cotune prompts edit` writes the records of its comparison into a folder next to the file.
    next_to_folder = read_if_typed(folder.parent / _PROMPTS, _PromptsFile)
    if next_to_folder is None or Path(next_to_folder.evaluation.records).name != folder.name:
        return None
    return next_to_folder


def _verdict(held_out: _HeldOut) -> str:
    """The verdict as text: `the best prompts are better by 0.267 (95% interval 0.100 to 0.433) on 15 held-out
    tasks`."""
    low, mean, high = held_out.difference
    on_tasks = f"on {plural(held_out.tasks, 'held-out task')}"
    if low is None or high is None:
        return f"no difference shown {on_tasks}"
    interval = f"({100 * held_out.level:.3g}% interval {figure(low)} to {figure(high)})"
    if low <= 0 <= high:
        return f"no difference shown: {figure(mean)} {interval} {on_tasks}"
    direction = "better" if low > 0 else "worse"
    return f"the best prompts are {direction} by {figure(abs(mean))} {interval} {on_tasks}"
