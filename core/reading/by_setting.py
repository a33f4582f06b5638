"""Runs grouped by one of their settings: the same figure of each run, with an interval over the runs of a group.

Runs that differ in the setting and in their seeds show what the setting does. A run is one observation: the interval
says how much the figure varies from seed to seed, not from task to task.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import msgspec

from cotune.errors import ConfigError
from cotune.intervals import Interval, student_quantile
from cotune.near_names import did_you_mean, near_names
from cotune.reading.facts import facts
from cotune.reading.headline import STARTS, Change
from cotune.reading.run import OpenedRun
from cotune.reading.words import figure_name
from cotune.storage.run_layout import leaves
from cotune.tables import plural

SEED = "seed"
MOST_NAMED = 5
"""Settings that a note names; the others are counted."""


class RunOfGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a group: its seed, and its figure at the end and, if that is known, at its start."""

    name: str
    seed: int
    last: float
    first: float | None = None


class SettingGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The runs with one value of the setting, with intervals over these runs.

    `gain` is the mean of last - first; None unless every run has both. `against_first` is the mean difference from the
    first group, over the seeds that both groups have; None for the first group, and without two shared seeds.
    """

    value: str
    runs: tuple[RunOfGroup, ...]
    last: Interval
    gain: Interval | None = None
    against_first: Interval | None = None


class BySetting(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of many runs by one of their settings. `notes` are remarks that the table does not show."""

    setting: str
    figure: str
    percent: bool
    groups: tuple[SettingGroup, ...]
    notes: tuple[str, ...] = ()


def by_setting(runs: Sequence[OpenedRun], setting: str) -> BySetting:
    """Group runs by a setting of their configuration (`recipe`, `learner.lr`), and compare one figure of the groups.

    It is the figure that most runs with the setting have in their headlines, usually the success on held-out tasks.
    Runs without it are left out, with a note. Raises ConfigError for a setting that no run has, and if no run with the
    setting has a figure.
    """
    trained = [run for run in runs if run.is_run]
    settings_of_run: dict[str, dict[str, Any]] = {}
    all_settings: set[str] = set()
    for run in trained:
        settings = dict(leaves(run.description.get("config") or {}))  # by dotted name
        settings_of_run[run.name] = settings
        all_settings.update(settings)
    if setting not in all_settings:
        suggestion = did_you_mean(near_names(setting, sorted(all_settings)))
        remedy = suggestion or "Name a setting by its dotted name: learner.lr."
        raise ConfigError("--by", setting, f"is no setting of these {plural(len(trained), 'run')}", remedy)

    # 1. One figure for all runs, from their headlines.
    changes_of_run: dict[str, dict[str, Change]] = {}
    for run in trained:
        changes_of_run[run.name] = {figure_name(change): change for change in run.headline.changes}
    figure = _commonest_figure([changes_of_run[run.name] for run in trained if setting in settings_of_run[run.name]])
    if figure is None:
        remedy = "Train with held-out tasks (--eval-tasks FILE), or evaluate the runs."
        raise ConfigError("--by", setting, "finds no run with a figure", remedy)

    # 2. The runs by value of the setting, in the order in which the values first appear.
    rows_of_value: dict[str, list[RunOfGroup]] = {}
    compared: list[OpenedRun] = []
    left_out: list[str] = []
    for run in trained:
        settings = settings_of_run[run.name]
        change = changes_of_run[run.name].get(figure)
        if change is None or setting not in settings:
            left_out.append(run.name)
            continue
        compared.append(run)
        value = _value_text(settings[setting])
        if setting == "recipe":
            value = facts(run).recipe or value  # without a recipe, a run uses the default of its plan
        rows_of_value.setdefault(value, []).append(_row(run.name, settings, change))

    # 3. The figure of each group, compared with the first group.
    groups: list[SettingGroup] = []
    for value, rows in rows_of_value.items():
        baseline = groups[0].runs if groups else None
        groups.append(_group(value, rows, baseline))
    notes = _notes(compared, settings_of_run, setting, groups)
    if left_out:
        notes.append(f"Left out, without this figure or setting: {', '.join(left_out)}.")
    is_percent = changes_of_run[compared[0].name][figure].percent
    return BySetting(setting=setting, figure=figure, percent=is_percent, groups=tuple(groups), notes=tuple(notes))


def _commonest_figure(figures_of_runs: Iterable[Mapping[str, Change]]) -> str | None:
    """The name of the figure that most runs have; among equals, the first one. None if no run has a figure."""
    counts: Counter[str] = Counter()
    for figures in figures_of_runs:
        counts.update(figures.keys())
    return max(counts, key=lambda name: counts[name], default=None)


def interval_over_runs(values: Sequence[float]) -> Interval:
    """The mean with Student's t interval; without bounds for a single value."""
    centre = fmean(values)
    if len(values) < 2:
        return Interval(mean=centre, n=len(values))
    half = student_quantile(len(values) - 1) * stdev(values) / len(values) ** 0.5
    return Interval(mean=centre, low=centre - half, high=centre + half, n=len(values))


def _row(name: str, settings: Mapping[str, Any], change: Change) -> RunOfGroup:
    """A run of a group, from its settings by dotted name and its figure."""
    first = None
    # Of other sources, the first value is not the start of the run, but its first evaluation within training.
    if change.first is not None and change.first_of in STARTS:
        first = change.first.mean
    return RunOfGroup(name=name, seed=int(settings.get(SEED, 0)), last=change.last.mean, first=first)


def _group(value: str, rows: Sequence[RunOfGroup], baseline: Sequence[RunOfGroup] | None) -> SettingGroup:
    """The runs with one value of the setting, summarised.

    `baseline` are the runs of the first group, which each other group is compared with; None for the first group.
    """
    gains = [row.last - row.first for row in rows if row.first is not None]
    against_baseline = None
    if baseline is not None:
        # Runs of one seed share tasks and random numbers, so their difference varies less than the two figures.
        baseline_of_seed = _by_seed(baseline)
        last_of_seed = _by_seed(rows)
        differences = [last_of_seed[seed] - baseline_of_seed[seed] for seed in last_of_seed if seed in baseline_of_seed]
        against_baseline = interval_over_runs(differences) if len(differences) > 1 else None
    return SettingGroup(
        value=value,
        runs=tuple(rows),
        last=interval_over_runs([row.last for row in rows]),
        # Without the start of a run there is no gain; a mean over the other runs would be of another set of seeds.
        gain=interval_over_runs(gains) if len(gains) == len(rows) else None,
        against_first=against_baseline,
    )


def _by_seed(rows: Sequence[RunOfGroup]) -> dict[int, float]:
    """The figure of each seed, as the mean of its runs."""
    figures_of_seed: dict[int, list[float]] = {}
    for row in rows:
        figures_of_seed.setdefault(row.seed, []).append(row.last)
    return {seed: fmean(figures) for seed, figures in figures_of_seed.items()}


def _notes(
    runs: Sequence[OpenedRun],
    settings: Mapping[str, Mapping[str, Any]],
    setting: str,
    groups: Sequence[SettingGroup],
) -> list[str]:
    """Warnings about the comparison: repeated seeds, unfinished runs, and other settings that differ."""
    notes: list[str] = []
    for group in groups:
        repeated = [seed for seed, count in Counter(row.seed for row in group.runs).items() if count > 1]
        if repeated:
            seeds = ", ".join(map(str, sorted(repeated)))
            notes.append(f"{group.value}: several runs have seed {seeds}, so the interval is too narrow.")
    unfinished = [run.name for run in runs if run.state != "finished"]
    if unfinished:
        notes.append(f"Not finished: {', '.join(unfinished)}.")
    names: set[str] = set()
    for run in runs:
        names.update(settings[run.name])
    differing: list[str] = []
    for name in sorted(names - {setting, SEED}):
        values = {_value_text(settings[run.name].get(name)) for run in runs}
        if len(values) > 1:
            differing.append(name)
    if differing:
        text = ", ".join(differing[:MOST_NAMED])
        if len(differing) > MOST_NAMED:
            text += f" and {len(differing) - MOST_NAMED} more"
        notes.append(f"The runs also differ in {text}: a difference may come from these.")
    return notes


def _value_text(value: Any) -> str:
    """A value as a row's name; an empty text is the default."""
    if isinstance(value, str):
        return value or "(default)"
    return json.dumps(value)
