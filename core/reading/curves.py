"""Curves of a run's metrics by step. The curves of several runs share a chart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from cotune.algorithms.run_recipe import all_taught
from cotune.reading.evaluations import IN_TRAINING
from cotune.reading.headline import SINGLE
from cotune.reading.metrics import registry
from cotune.reading.run import OpenedRun


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart: `values` for each step of the chart, None for a step without a value. `low` and `high` bound
    its 95% interval."""

    label: str
    run: str
    values: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart: the steps on its x axis (from 1) and its lines. `help` explains it, `phase` names its episodes."""

    id: str
    title: str
    help: str
    section: str
    steps: list[int]
    series: list[Series]
    percent: bool = False
    phase: str = "train"


class _Curve(NamedTuple):
    """The values of a run by step, from 1, as they are in its metrics: not only numbers. `label` names the curve."""

    label: str
    run: OpenedRun
    by_step: Mapping[int, Any]


_MOST_LEFT_OUT = 6


def charts(runs: Sequence[OpenedRun]) -> list[Chart]:
    """All charts for which at least one of these runs has figures."""
    taught = all(all_taught(run.config) for run in runs)
    # 1. The results: the figures of training's evaluations, of episodes, of roles and of policies.
    all_charts = [
        _held_out(runs, "success", HELD_OUT_SUCCESS, percent=True),
        _held_out(runs, "reward", HELD_OUT_REWARD, percent=False),
        *_outcomes(runs, selected=False),
        *_by_name(runs, "roles", taught),
        *_by_name(runs, "policies", taught),
        *_outcomes(runs, selected=True),
        _held_out(runs, "calls", "Calls per held-out episode", percent=False),
        _calls_per_episode(runs),
    ]

    # 2. How the steps went. The first line of metrics.jsonl also has the seconds before the step (`load`, `look`).
    text = "Where the time of a step goes."
    all_charts.append(_counts_chart(runs, "seconds", "Seconds by phase", text, without=("load", "look")))
    text = "Sampled tokens of trained roles, over the whole step."
    all_charts.append(_figure_chart(runs, "tokens_per_s", "Tokens per second", text))
    text = "Candidates that were not trained on. The page of groups explains the reasons."
    all_charts.append(_counts_chart(runs, "left_out", "Left out, by reason", text, most=_MOST_LEFT_OUT))
    text = "Episodes that ended in an error."
    all_charts.append(_figure_chart(runs, "failed", "Failed episodes", text))
    all_charts.append(_figure_chart(runs, "rows", "Candidates trained on", "Rows of the update."))
    return [chart for chart in all_charts if chart is not None]


HELD_OUT_SUCCESS = "Success on held-out tasks"
HELD_OUT_REWARD = "Reward on held-out tasks"
HELD_OUT = (HELD_OUT_SUCCESS, HELD_OUT_REWARD)
"""Titles of the charts with training's evaluations."""
FIRST = (
    *HELD_OUT, "Held-out loss", "Distance from the teacher", "Reward",
    "Pairs ranked right", "Entropy", "Loss",
)  # fmt: skip
"""Titles of the most informative charts, in order. None of them shows selected candidates."""


def first_charts(all_charts: Sequence[Chart], most: int = 3, *, held_out: bool = True) -> list[Chart]:
    """The most informative charts of a run. With `held_out` False, without the charts of training's evaluations."""
    titles = [title for title in FIRST if held_out or title not in HELD_OUT]
    first = [chart for chart in all_charts if chart.title in titles]
    return sorted(first, key=lambda chart: FIRST.index(chart.title))[:most]


def _chart_of_curves(curves: Iterable[_Curve], **chart_fields: Any) -> Chart | None:
    """A chart of curves; None if no value is a number. A curve without a number is left out.

    `chart_fields` are the other fields of the chart: its title, help text, section and so on.
    """
    numeric_curves: list[tuple[_Curve, dict[int, float]]] = []
    all_steps: set[int] = set()
    for curve in curves:
        numbers = _numbers(curve.by_step)
        if numbers:
            numeric_curves.append((curve, numbers))
            all_steps.update(numbers)
    if not numeric_curves:
        return None
    steps = sorted(all_steps)
    series: list[Series] = []
    for curve, numbers in numeric_curves:
        values = [numbers.get(step) for step in steps]
        series.append(Series(label=curve.label, run=curve.run.name, values=values))
    name = f"{chart_fields['section']} {chart_fields['title']}".lower().replace("/", " ").replace(",", "")
    return Chart(id="-".join(name.split()), steps=steps, series=series, **chart_fields)


def _label(runs: Sequence[OpenedRun], run: OpenedRun, name: str) -> str:
    """The label of the line `name` of a run in a chart of these runs."""
    return f"{run.name} · {name}" if len(runs) > 1 else name


def _only_label(runs: Sequence[OpenedRun], run: OpenedRun, name: str) -> str:
    """The label of a run's only line: several runs differ by their names."""
    return run.name if len(runs) > 1 else name


def _by_step(run: OpenedRun, *keys: str) -> dict[int, Any]:
    """The value under nested keys of each line of metrics.jsonl, by step, from 1; {} for a line without these keys."""
    by_step: dict[int, Any] = {}
    for line in run.metrics:
        value: Any = line
        for key in keys:
            value = value.get(key, {})
        by_step[line["step"] + 1] = value
    return by_step


def _held_out(runs: Sequence[OpenedRun], name: str, title: str, *, percent: bool) -> Chart | None:
    """A chart of the figure `name` of training's evaluations on held-out tasks, with its interval as a band; None
    without any evaluation."""
    text = "One episode for each held-out task, single samples, nothing selected. Step 0 is before training."
    if name != "calls":
        text += " The band is its 95% interval."
    if sets := ", ".join(dict.fromkeys(run.held_out_tasks for run in runs if run.held_out_tasks)):
        text += f" Tasks: {sets}."
    figures = {run.name: _held_out_figures(run, name) for run in runs}
    curves = [_Curve(_only_label(runs, run, name), run, figures[run.name]["mean"]) for run in runs]
    chart = _chart_of_curves(curves, title=title, help=text, section="Outcome", percent=percent, phase="eval")
    if chart is None:
        return None
    with_bounds: list[Series] = []
    for series in chart.series:
        low_by_step = _numbers(figures[series.run]["low"])
        high_by_step = _numbers(figures[series.run]["high"])
        if not low_by_step or not high_by_step:
            with_bounds.append(series)
            continue
        low = [low_by_step.get(step) for step in chart.steps]
        high = [high_by_step.get(step) for step in chart.steps]
        with_bounds.append(msgspec.structs.replace(series, low=low, high=high))
    return msgspec.structs.replace(chart, series=with_bounds)


def _held_out_figures(run: OpenedRun, name: str) -> dict[str, dict[int, Any]]:
    """The `mean` of a held-out figure and the bounds of its interval (`low`, `high`), each by step. Step 0 is the
    evaluation before training."""
    figures = {
        "mean": _by_step(run, "held_out", name),
        "low": _by_step(run, "held_out", f"{name}_low"),
        "high": _by_step(run, "held_out", f"{name}_high"),
    }
    in_training = [evaluation for evaluation in run.evaluations if evaluation.name.startswith(IN_TRAINING)]
    before = next((evaluation for evaluation in in_training if evaluation.steps == 0), None)
    if before is None:
        return figures
    for mode in before.evaluations.values():
        if name == "calls":
            calls = list(mode.calls_by_task.values())
            if calls:
                figures["mean"][0] = fmean(calls)
        elif interval := getattr(mode, name):
            figures["mean"][0] = interval.mean
            figures["low"][0] = interval.low
            figures["high"][0] = interval.high
    return figures


def _outcomes(runs: Sequence[OpenedRun], *, selected: bool) -> Iterable[Chart | None]:
    """Charts of the outcomes of training episodes: of single samples, or with `selected`, of paths that were chosen
    among candidates."""
    runs_of_path: dict[str, list[OpenedRun]] = {}
    for run in runs:
        if run.metrics:
            runs_of_path.setdefault(run.metrics[-1].get("path") or SINGLE, []).append(run)
    for path, path_runs in runs_of_path.items():
        is_selected = path != SINGLE
        if is_selected != selected:
            continue
        names: set[str] = set()
        for run in path_runs:
            for line in run.metrics:
                names.update(line["outcome"])
        for name in sorted(names, key=lambda name: (name != "success", name)):  # success first
            curves = [_Curve(_only_label(runs, run, name), run, _by_step(run, "outcome", name)) for run in path_runs]
            title = f"{name.capitalize()} in training"
            text = f"Mean over the step's episodes, of {path}; failed ones count."
            section = "Outcome"
            if selected:
                title = f"{path.capitalize()}, {name}"
                text += " Not what single samples reach."
                section = "Selected candidates"
            yield _chart_of_curves(curves, title=title, help=text, section=section, percent=name == "success")


def _by_name(runs: Sequence[OpenedRun], table: str, taught: bool) -> Iterator[Chart | None]:
    """A chart for each figure by role or by policy that has a title in the registry.

    `table` is `roles` or `policies`. `taught` is whether the runs learn from teachers, for which some figures have
    another title and explanation.
    """
    for figure, metric in registry()[table].items():
        if not metric.title:
            continue
        curves: list[_Curve] = []
        for run in runs:
            names: set[str] = set()
            for line in run.metrics:
                names.update(line.get(table, {}))
            for name in sorted(names):
                curves.append(_Curve(_label(runs, run, name), run, _by_step(run, table, name, figure)))
        title = metric.title
        text = metric.help
        if taught and metric.taught:
            title = metric.taught_title or metric.title
            text = metric.taught
        chart = _chart_of_curves(curves, title=title, help=text, section=table.capitalize(), percent=metric.share)
        yield _unless_zero(chart)


def _counts_chart(
    runs: Sequence[OpenedRun], name: str, title: str, text: str, most: int | None = None, without: Sequence[str] = ()
) -> Chart | None:
    """A chart of a metric that has a count for each key, such as `left_out`: a line for each key.

    `most` is the maximum number of keys of a run, by their totals. The keys in `without` are not shown.
    """
    curves: list[_Curve] = []
    for run in runs:
        totals: Counter[str] = Counter()
        for line in run.metrics:
            totals.update(line.get(name, {}))
        for key in without:
            totals.pop(key, None)
        for key, _ in totals.most_common(most):
            # People count steps from 1, the file from 0.
            by_step = {line["step"] + 1: line.get(name, {}).get(key, 0) for line in run.metrics}
            curves.append(_Curve(_label(runs, run, key), run, by_step))
    return _chart_of_curves(curves, title=title, help=text, section="The run")


def _figure_chart(runs: Sequence[OpenedRun], name: str, title: str, text: str) -> Chart | None:
    """A chart of a metric that has one number for each step; None if it is 0 in all of them."""
    curves = [_Curve(_only_label(runs, run, name), run, _by_step(run, name)) for run in runs]
    return _unless_zero(_chart_of_curves(curves, title=title, help=text, section="The run"))


def _calls_per_episode(runs: Sequence[OpenedRun]) -> Chart | None:
    """A chart of the calls per training episode.

    Steps of a replay plan are left out: their episodes make only the calls after a fork.
    """
    curves: list[_Curve] = []
    for run in runs:
        by_step: dict[int, float] = {}
        for line in run.metrics:
            if line.get("episodes") and not line.get("replay"):
                by_step[line["step"] + 1] = line["calls"] / line["episodes"]
        curves.append(_Curve(_only_label(runs, run, "calls"), run, by_step))
    text = "Calls of all roles in a training episode. Fewer are faster and cheaper, if success does not fall."
    return _unless_zero(_chart_of_curves(curves, title="Calls per episode", help=text, section="The run"))


def _unless_zero(chart: Chart | None) -> Chart | None:
    """The chart; None for one whose values are all 0 or missing."""
    if chart is None or not any(any(series.values) for series in chart.series):
        return None
    return chart


def _numbers(by_step: Mapping[int, Any]) -> dict[int, float]:
    """The values that a chart can show: finite numbers."""
    numbers = {}
    for step, value in by_step.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[step] = float(value)
    return numbers
