"""The pages on whole runs: the list of runs, the overview of one, curves, and configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from cotune.integrations.web.http.requests import json_response
from cotune.integrations.web.viewer.chart_csv import chart_as_csv
from cotune.integrations.web.viewer.episodes import newest
from cotune.integrations.web.viewer.rendering import address, doing, plain, render
from cotune.integrations.web.viewer.viewer import KnownField, Viewer, hues
from cotune.reading.curves import charts, first_charts
from cotune.reading.evaluations import IN_TRAINING
from cotune.reading.facts import ending, facts, find_troubles, learned_answers
from cotune.reading.first_page import first_page
from cotune.reading.run import OpenedRun
from cotune.reading.use import total_cost
from cotune.storage.episode_filters import EVERYTHING
from cotune.storage.run_layout import leaves

FAILED_TASKS = 10
"""Most failed tasks that the overview shows."""


def runs_page(viewer: Viewer, request: Request) -> Response:
    """All runs side by side, including new ones since the start of the viewer."""
    viewer.look_again()
    if len(viewer.runs) == 1 and "all" not in request.query_params:
        return RedirectResponse(address("run", next(iter(viewer.runs))))
    rows = [(run, facts(run), run.headline.changes[:3]) for run in list(viewer.runs.values())]
    return viewer.page(request, "runs.html", rows=rows, seen=_stamp_of_runs(viewer))


def runs_changed_part(viewer: Viewer, request: Request) -> Response:
    """A text that changes with the runs and what they record."""
    viewer.look_again()
    return json_response({"stamp": _stamp_of_runs(viewer), "state": "recording", "now": ""})


def _stamp_of_runs(viewer: Viewer) -> str:
    states = "|".join(f"{name} {run.stamp} {run.state}" for name, run in list(viewer.runs.items()))
    return hashlib.sha256(states.encode()).hexdigest()[:16]


def overview_page(viewer: Viewer, request: Request) -> Response:
    """A run at a glance."""
    run = viewer.run(request)
    page = first_page(run, FAILED_TASKS)
    # An evaluation of `cotune eval` has other tasks than the evaluations in training. Next to its figures, their curves
    # would look like the same figures with other values, so only the page of curves shows them.
    evaluation = page.headline.evaluation
    in_training = evaluation is None or evaluation.name.startswith(IN_TRAINING)
    return viewer.page(
        request,
        "overview.html",
        run,
        facts=facts(run),
        page=page,
        troubles=find_troubles(run, of_calls=False),
        ending=ending(run),
        charts=first_charts(charts([run]), held_out=in_training),
        learned=learned_answers(run),
        latest=newest(run, EVERYTHING, 8),
    )


def use_part(viewer: Viewer, request: Request) -> Response:
    """Tokens and cost by role. The page loads this part later, because it sums over all calls."""
    run = viewer.run(request)
    uses = dict(sorted(viewer.totals(run).by_role(viewer.prices).items()))
    template = "use_of_run.html" if "sum" in request.query_params else "use.html"
    return HTMLResponse(render(template, uses=uses, total=total_cost(uses), hues=hues(run, *uses)))


def changed_part(viewer: Viewer, request: Request) -> Response:
    """A text that changes with the run, and the phase of the run."""
    run = viewer.run(request)
    return json_response({"stamp": run.stamp, "state": run.state, "now": plain(doing(run.now))})


def curves_page(viewer: Viewer, request: Request) -> Response:
    """Curves of a run, or of several in the same charts."""
    run, shown = viewer.chosen(request)
    all_charts = charts(shown)
    if chart_id := request.query_params.get("csv"):
        chart = next((chart for chart in all_charts if chart.id == chart_id), None)
        if chart is None:
            raise HTTPException(404, f"There is no chart {chart_id[:100]} here.")
        return chart_as_csv(chart)
    names = [shown_run.name for shown_run in shown]
    return viewer.page(request, "curves.html", run, charts=all_charts, shown=names)


def configuration_page(viewer: Viewer, request: Request) -> Response:
    """The page with the configuration of one run, or with the differences between the configurations of several."""
    run, shown_runs = viewer.chosen(request)
    differing_only = len(shown_runs) > 1 and "all" not in request.query_params
    set_only = "set" in request.query_params
    tables = [settings(shown_run) for shown_run in shown_runs]
    groups = grouped(tables, viewer.fields, differing_only=differing_only, set_only=set_only)
    # For each run, the changes from before to after training, such as of its success, and the names of all of them.
    changes_of_runs = [shown_run.headline.changes for shown_run in shown_runs]
    change_names: dict[str, None] = {}  # in order, without duplicates
    for changes in changes_of_runs:
        change_names |= dict.fromkeys(change.name for change in changes)
    return viewer.page(
        request,
        "compare.html",
        run,
        groups=groups,
        shown=shown_runs,
        only=differing_only,
        set_only=set_only,
        headlines=changes_of_runs,
        figures=list(change_names),
    )


class ShownField(msgspec.Struct, frozen=True, kw_only=True):
    """A field of the configuration. `default` and `help` are empty if it is not documented."""

    name: str
    values: tuple[str, ...]
    """Its value in each run."""
    differs: bool
    """Whether the values differ between the runs."""
    default: str
    help: str
    changed: tuple[bool, ...]
    """For each value, whether it differs from the default."""


def grouped(
    tables: Sequence[Mapping[str, str]], fields: Mapping[str, KnownField], *, differing_only: bool, set_only: bool
) -> dict[str, list[ShownField]]:
    """The fields of runs, grouped by the headings of the documentation and in its order.

    `tables` has the value of each field, by its name, for each run. With `differing_only`, only fields that differ
    between the runs are returned; with `set_only`, only fields that differ from their default.
    """
    # 1. Order the fields as the documentation does. Undocumented fields come last.
    names: set[str] = set()
    for table in tables:
        names.update(table)
    documented_names = [name for name in fields if name in names]
    other_names = sorted(names.difference(documented_names))
    headings = list(dict.fromkeys(name.rpartition(".")[0] for name in fields))

    # 2. Select the fields, and put each below its heading.
    groups: dict[str, list[ShownField]] = {}
    for name in [*documented_names, *other_names]:
        values = tuple(table.get(name, "–") for table in tables)
        field = _shown_field(name, values, fields.get(name))
        if differing_only and not field.differs:
            continue
        if set_only and name in fields and not any(field.changed):
            continue
        groups.setdefault(_heading_of(name, headings), []).append(field)

    # 3. Order the headings: documented ones in their order, then others; versions and changes come last.
    def sort_key(heading: str) -> tuple[bool, int]:
        position = headings.index(heading) if heading in headings else len(headings)
        return heading in ("versions", "changes"), position

    return {heading: groups[heading] for heading in sorted(groups, key=sort_key)}


def _shown_field(name: str, values: tuple[str, ...], documented: KnownField | None) -> ShownField:
    """A field with its value in each run. `documented` is its entry in the documentation, if it has one."""
    differs = len(set(values)) > 1
    if documented is None:
        return ShownField(
            name=name, values=values, differs=differs, default="", help="", changed=(False,) * len(values)
        )
    return ShownField(
        name=name,
        values=values,
        differs=differs,
        default=documented.default,
        help=documented.help,
        changed=tuple(value not in (documented.default, "–") for value in values),
    )


def _heading_of(name: str, headings: Sequence[str]) -> str:
    """The most specific heading of a field; for an undocumented field, the first part of its name."""
    for heading in reversed(headings):
        if heading and name.startswith(f"{heading}."):
            return heading
    first_part, dot, _ = name.partition(".")
    return first_part if dot else ""


def settings(run: OpenedRun) -> dict[str, str]:
    """Every field of a run's configuration, and its model, tasks, workflow and versions of packages."""
    description = run.description
    table: dict[str, Any] = {**(description.get("config") or {})}
    for name in ("workflow", "tasks", "versions", "changes"):
        if description.get(name):
            table[name] = description[name]
    texts = {}
    for name, value in leaves(table):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        texts[name] = text or "–"
    return texts
