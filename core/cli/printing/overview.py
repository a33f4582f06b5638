"""`cotune show`: an overview of a run or records file, with its latest episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cotune.cli.printing.episode import episode_parts
from cotune.cli.printing.first_page import FAILED_TASKS, first_page_parts
from cotune.cli.printing.groups import show_groups
from cotune.errors import RecordError, RunError
from cotune.reading.exchange import Exchange, exchanges, first_characters
from cotune.reading.facts import Learned, Trouble, facts, find_troubles, further_bases, learned_answers
from cotune.reading.first_page import first_page
from cotune.reading.run import OpenedRun
from cotune.reading.use import Totals
from cotune.records.ids import ID
from cotune.storage.episode_filters import EVERYTHING, EpisodeFilters
from cotune.storage.protocol import Store
from cotune.tables import BAD, GOOD, NAME, QUIET, cells, grid, plural, scores, warn

MOST_OPEN = 1_000_000
"""Maximum number of unfinished episodes that are counted."""
CAUSES = 3
"""Maximum number of causes of failed episodes that are shown."""
SHOWN_ID = 8
"""Number of last letters of an episode's id that are shown."""


def show_run(
    path: Path | str,
    *,
    episode: str | None = None,
    groups: bool = False,
    filters: EpisodeFilters = EVERYTHING,
    full: bool = False,
    limit: int = 20,
) -> Group:
    """The text to print for the run or records file at `path`: an overview and the latest `limit` episodes that match.

    With `episode`, this episode as a tree of calls (with `full`, whole prompts and answers). With `groups`, the groups
    of the latest `limit` training steps. Raises RunError without records, RecordError for an unknown episode.
    """
    with OpenedRun(path) as run:
        # A run that learned from recorded answers has no episodes of its own.
        learned = learned_answers(run)
        if learned is not None:
            if not learned.path:
                cause = f"{path}/run.json is broken: it has no config.records.path."
                raise RunError(cause, "Restore it, or start a new run.")
            if episode or groups:
                cause = f"{path} learned from records and recorded no episodes."
                raise RunError(cause, f"The episodes are in {learned.path}.")
            return Group(*_learned_lines(run, learned))

        if episode is not None:
            return Group(*episode_parts(run.store, run.figures.episode_named(episode), full))
        if groups:
            return Group(*show_groups(run, limit))

        unfinished = run.figures.open_episodes(MOST_OPEN)
        head = Text.assemble(("records ", "bold"), run.store.address, "\n")
        page = first_page_parts(first_page(run, FAILED_TASKS))
        tables = _overview_parts(run, len(unfinished))
        return Group(head, *page, "", *tables, *_episodes(run.store, unfinished[:limit], filters, limit))


def _overview_parts(run: OpenedRun, interrupted: int) -> Iterable[RenderableType]:
    """Base models and problems of a run, its episodes by phase, its calls by role, and the records that are missing.

    `interrupted` is the number of unfinished episodes.
    """
    # This page is about the whole run, so it leaves out the remarks of a single step.
    problems = [trouble for trouble in find_troubles(run, CAUSES) if trouble.kind != "last step"]
    lines = [(f"{name} has the base model {model}\n", "") for name, model in further_bases(run).items()]
    lines += _problem_lines(problems, "episodes", "untrained", "cut", "precision")
    if lines:
        yield Text.assemble(*lines)
    yield _phase_table(run)
    yield ""
    yield _role_table(run)
    yield Text.assemble("\n", _missing_records(run, interrupted), "\n", *_problem_lines(problems, "calls"))


def _phase_table(run: OpenedRun) -> Table:
    """A table of the episodes of each phase, with the mean of each component of their outcomes."""
    means: dict[str, dict[str, float | None]] = {}
    for component in run.figures.outcome_means(run.config.on_failure):
        means.setdefault(component.phase, {})[component.name] = component.mean
    table = grid("phase", "episodes>", "ok>", "error>", "cancelled>", "tasks>", "steps>", "seconds>", "mean reward")
    for phase in run.figures.episodes_by_phase():
        columns = (
            phase.phase,
            phase.episodes,
            phase.ok,
            warn(phase.failed),
            warn(phase.cancelled),
            phase.tasks,
            phase.steps or "",
            f"{phase.mean_seconds:.2f}",
        )
        table.add_row(*cells(columns), scores(means.get(phase.phase, {})))
    return table


def _role_table(run: OpenedRun) -> Table:
    """A table of the calls of each role, with the mean of each component of their rewards."""
    rewards: dict[str, dict[str, float]] = {}
    for role, name, value in run.figures.rewards_by_role():
        rewards.setdefault(role, {})[name] = value
    use_of_role = Totals(run).by_role()
    any_failed = any(use.failed for use in use_of_role.values())
    titles = ("calls>", "failed>", "turns>", "candidates>", "prompt tokens>", "answer tokens>", "seconds a call>")
    table = grid("role", *titles, "mean reward")
    for role, use in use_of_role.items():
        columns = (
            role,
            use.calls,
            warn(use.failed) if any_failed else "",
            use.turns,
            use.candidates,
            use.prompt,
            use.completion,
            f"{use.seconds / use.calls:.3f}",
        )
        table.add_row(*cells(columns), scores(rewards.get(role, {})))
    return table


def _missing_records(run: OpenedRun, interrupted: int) -> Text:
    """A line with the numbers of unfinished episodes and lost records. Losses are in red."""
    counters = run.store.counters()
    counts = [
        (plural(interrupted, "unfinished episode"), interrupted),
        (f"{plural(counters['lost'], 'record')} lost", counters["lost"]),
        (f"{plural(counters['refused'], 'late reward')} refused", counters["refused"]),
    ]
    if counters["dropped"]:
        counts.append((f"{plural(counters['dropped'], 'record')} dropped by applications", counters["dropped"]))
    texts = [Text(text, style=BAD if count else QUIET) for text, count in counts]
    if counters["sampled"]:  # the user asked for a sample of the calls, so this is no loss
        texts.append(Text(f"{plural(counters['sampled'], 'call')} left out by sampling", style=QUIET))
    return Text(" · ", style=QUIET).join(texts)


def _problem_lines(problems: Sequence[Trouble], *kinds: str) -> Iterable[tuple[str, str]]:
    """Problems of these kinds, each a line with its style: a remark, which has no count, is yellow."""
    for kind in kinds:
        for problem in problems:
            if problem.kind == kind:
                yield f"{problem.text}\n", BAD if problem.count else "yellow"


def _episodes(
    store: Store, unfinished: Sequence[tuple[str, int]], filters: EpisodeFilters, limit: int
) -> Iterable[RenderableType]:
    """A table of the latest episodes that match the filters, the newest last, then of the `unfinished` ones, which have
    calls but no end.
    """
    total = store.figures().episode_count(filters)
    ids = store.figures().episode_ids(filters, limit)
    title = plural(total, "episode")
    if len(ids) < total:
        title = f"the latest {len(ids)} of {title}"
    if filters.task:
        title += f" of task {filters.task}"
    yield Text(f"{title}\n", style="bold")
    # An unfinished episode has no fields to filter by.
    shown_unfinished = unfinished if filters == EVERYTHING else ()
    if not ids and not shown_unfinished:
        return
    table = grid("episode", "task", "phase", "step>", "calls>", "seconds>", "status", "reward")
    rewards = store.rewards(ids)
    texts = exchanges(store, ids)
    for id in reversed(ids):
        if exchange := texts.get(id):
            table.below[table.row_count] = exchange_lines(exchange)
        try:
            episode = store.episode(id)
        except RecordError:
            table.add_row(_short_id(id), "", "", "", "", "", Text("broken row", style=BAD), scores(rewards[id]))
            continue
        status = Text(episode.status, style=GOOD if episode.status == "ok" else BAD)
        step = "" if episode.training_step is None else episode.training_step + 1
        row = (_short_id(id), episode.task.id, episode.phase, step, episode.calls, f"{episode.latency:.2f}")
        table.add_row(*cells(row), status, scores(rewards[id]))
    for id, calls in reversed(shown_unfinished):
        table.add_row(_short_id(id), "", "", "", str(calls), "", Text("open", style="yellow"), "")
    yield table


def exchange_lines(exchange: Exchange) -> list[Text]:
    """The beginning of a question and the beginning of its answer, each as a line."""
    lines: list[Text] = []
    if exchange.question:
        lines.append(Text.assemble(("asked ", QUIET), first_characters(exchange.question)))
    if exchange.answer:
        lines.append(Text.assemble(("answered ", QUIET), first_characters(exchange.answer)))
    return lines


def _short_id(id: str) -> Text:
    """The end of an episode's id, which commands accept as its name. Ids of about the same time begin with the same
    letters. Ids in another form are shown whole."""
    return Text(id[-SHOWN_ID:] if ID.fullmatch(id) else id, style=NAME)


def _learned_lines(run: OpenedRun, recorded: Learned) -> Iterator[RenderableType]:
    """The lines to print about a run that learns from records: its steps, its verdict, and notes on the records."""
    lines = run.metrics
    about = facts(run)
    yield Text.assemble(("run ", "bold"), f"{run.path}: recipe {about.recipe}, learns from {recorded.path}")
    steps = f"{about.steps or 0} {'step' if about.steps == '1' else 'steps'}"
    trained_on = f"{plural(sum(line['rows'] for line in lines), 'row')} trained on" if lines else "no figures yet"
    yield Text(f"{steps}, {trained_on}\n")
    yield from first_page_parts(first_page(run, FAILED_TASKS))
    yield ""
    if not lines:
        return
    for note in lines[0].get("notes") or ():
        yield Text(note)
    yield Text(f"\nby step: cotune show {run.path} --steps; episodes: cotune show {recorded.path}", style=QUIET)
