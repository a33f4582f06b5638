"""`cotune show`: an overview of a run or records file, with its latest episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from cotune.algorithms.from_records import FROM_RECORDS
from cotune.algorithms.run_recipe import config_of
from cotune.cli.printing.episode import episode_parts
from cotune.cli.printing.groups import show_groups
from cotune.errors import RecordError, RunError
from cotune.reading.causes import causes, shortened
from cotune.reading.headline import Headline, read_headline
from cotune.reading.words import change_text
from cotune.records.policies import UNTRAINED
from cotune.storage.episode_filters import EVERYTHING, EpisodeFilters
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.run_layout import RunLayout, is_run, read_metrics, read_run
from cotune.tables import BAD, GOOD, NAME, QUIET, cells, grid, plural, scores, warn

CAUSES = 3
"""Causes of failed episodes that are shown."""


def show_run(
    path: Path | str,
    *,
    episode: str | None = None,
    groups: bool = False,
    filters: EpisodeFilters = EVERYTHING,
    full: bool = False,
    limit: int = 20,
) -> Group:
    """What to print of the run or records file at `path`: an overview and the latest `limit` episodes that fit.

    With `episode`, that episode as a tree of calls, whose prompts and answers are whole with `full`; with `groups`, the
    groups of the latest `limit` training steps.
    Raises RunError when there are no records, RecordError for an unknown episode.
    """
    if records := _learned_from(path):
        if episode or groups:
            raise RunError(f"{path} learns from records and has no episode of its own.", f"Those are in {records}.")
        return Group(*_learned(path, records))
    with open_store(path, read_only=True) as store:
        if episode is not None:
            return Group(*episode_parts(store, episode, full))
        if groups:
            return Group(*show_groups(store, limit))
        head, *tables = _overview(store)
        figures = _headline(read_headline(path))
        return Group(head, *figures, "", *tables, *_episodes(store, filters, limit))


def _overview(store: Store) -> Iterable[RenderableType]:
    """Episodes by phase, calls by role, and what went wrong."""
    yield Text.assemble(("records ", "bold"), store.address, "\n", *_causes(store))
    means: dict[str, dict[str, float | None]] = {}
    for phase, name, value, _ in store.outcome_means(config_of(store).on_failure):
        means.setdefault(phase, {})[name] = value
    phases = store.episodes_by_phase()
    back = ["abandoned>"] if any(abandoned for *_, abandoned, _, _, _ in phases) else []
    ends = ("ok>", "error>", "cancelled>", *back)
    counts = grid("phase", "episodes>", *ends, "tasks>", "steps>", "seconds>", "mean reward")
    for phase, total, good, errors, cancelled, abandoned, tasks, steps, seconds in phases:
        ended = (good, warn(errors), warn(cancelled), *([warn(abandoned)] if back else []))
        counts.add_row(
            *cells((phase, total, *ended, tasks, steps or "", f"{seconds:.2f}")), scores(means.get(phase, {}))
        )
    yield counts
    yield ""
    own: dict[str, dict[str, float]] = {}
    for role, name, value in store.rewards_by_role():
        own.setdefault(role, {})[name] = value
    calls = grid(
        "role", "calls>", "failed>", "turns>", "candidates>", "prompt>", "completion>", "seconds>", "mean reward"
    )
    for role, total, failed, turns, candidates, tokens, completion, seconds in store.calls_by_role():
        row = (role, total, warn(failed), turns, candidates, f"{tokens:,}", f"{completion:,}", f"{seconds:.3f}")
        calls.add_row(*cells(row), scores(own.get(role, {})))
    yield calls
    yield Text.assemble("\n", *_trouble(store))


def _causes(store: Store) -> Iterable[tuple[str, str]]:
    """Rollbacks of the run, why episodes failed, the commonest causes first, and the roles that the untrained model
    stands in for."""
    for back in read_run(store.folder).rollbacks if is_run(store.folder) else ():
        yield f"{back.text}\n", "yellow"
    shown, others = shortened(causes(store.failed_episodes()), CAUSES)
    for cause in shown:
        yield f"{plural(cause.count, 'episode')} {cause.text}\n", BAD
    if others:
        yield f"{others}\n", BAD
    for role, calls in store.answered_by(UNTRAINED.name):
        yield (
            f"role {role} has no policy: {UNTRAINED}, the untrained model, answered {plural(calls, 'call')}\n",
            "yellow",
        )


def _trouble(store: Store) -> Iterable[tuple[str, str] | str]:
    counters = store.counters()
    interrupted = len(list(store.unfinished()))
    yield plural(interrupted, "unfinished episode"), BAD if interrupted else QUIET
    yield " · ", QUIET
    yield f"{plural(counters['lost'], 'record')} lost", BAD if counters["lost"] else QUIET
    yield " · ", QUIET
    yield f"{plural(counters['refused'], 'late reward')} refused\n", BAD if counters["refused"] else QUIET
    for role, status, count in store.failed_calls():
        yield f"{plural(count, 'call')} of {role}: {status}\n", BAD


def _episodes(store: Store, filters: EpisodeFilters, limit: int) -> Iterable[RenderableType]:
    """The latest episodes that fit, newest last."""
    filtered = filters != EVERYTHING
    total = store.episode_count(filters)
    found = store.episode_ids(filters, limit)
    of_task = f" of task {filters.task}" if filters.task else ""
    left = f"the latest {len(found)} of " if len(found) < total else ""
    yield Text(f"{left}{plural(total, 'episode')}{of_task}\n", style="bold")
    if not found and (filtered or not store.open_episodes(1)):
        return
    table = grid("episode", "task", "phase", "step>", "calls>", "seconds>", "status", "reward")
    rewards = store.rewards(found)
    for id in reversed(found):
        try:
            episode = store.episode(id)
        except RecordError:
            table.add_row(
                Text(str(id), style=NAME), "", "", "", "", "", Text("broken row", style=BAD), scores(rewards[id])
            )
            continue
        status = Text(episode.status, style=GOOD if episode.status == "ok" else BAD)
        step = "" if episode.training_step is None else episode.training_step + 1
        row = (Text(str(id), style=NAME), episode.task.id, episode.phase, step, episode.calls, f"{episode.latency:.2f}")
        table.add_row(*cells(row), status, scores(rewards[id]))
    for id, calls in [] if filtered else store.open_episodes(limit)[::-1]:
        table.add_row(Text(str(id), style=NAME), "", "", "", str(calls), "", Text("open", style="yellow"), "")
    yield table


def _headline(found: Headline) -> Iterator[Text]:
    """The figures of a run, a line each, and its verdict."""
    for change in found.changes:
        yield Text(change_text(change), style=QUIET if change.kind == "selected" else "")
    if found.verdict and found.evaluation:
        yield Text.assemble((found.verdict, "bold"), (f" ({found.evaluation.name})", QUIET))


def _learned_from(path: Path | str) -> str:
    """The path of the records that a run learns from; empty for a run that makes episodes of its own, and for records.
    Raises RunError where run.json is broken."""
    layout = RunLayout(path)
    if not is_run(path) or layout.records.is_file() or (config := read_run(path).config).recipe not in FROM_RECORDS:
        return ""
    if not config.records.path:
        cause = f"{layout.run_json} is broken: it has no config.records.path."
        raise RunError(cause, "Restore it, or start a new run.")
    return config.records.path


def _learned(path: Path | str, records: str) -> Iterator[RenderableType]:
    """A run that learns from records: what from, its losses, and what was left out."""
    lines = [*read_metrics(path)]
    config = read_run(path).config
    yield Text.assemble(("run ", "bold"), f"{path}: recipe {config.recipe}, learns from {records}")
    done = f"{len(lines)} of {plural(config.steps, 'step')}" if config.steps else plural(len(lines), "step")
    if not lines:
        yield Text(f"{done}: no figures yet", style=QUIET)
        return
    yield Text(f"{done}, {plural(sum(line['rows'] for line in lines), 'row')} trained on\n")
    yield from _headline(read_headline(path))
    for note in lines[0].get("notes") or ():
        yield Text(note)
    yield Text(f"\nby step: cotune show {path} --steps; episodes: cotune show {records}", style=QUIET)
