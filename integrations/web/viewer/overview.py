"""The pages on whole runs: their list, one at a glance, curves, configuration."""

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
from cotune.reading.facts import ending, facts, learned, troubles
from cotune.reading.first_page import first_page
from cotune.reading.run import OpenedRun
from cotune.reading.use import total_cost
from cotune.storage.episode_filters import EVERYTHING
from cotune.storage.run_layout import leaves

FAILED_TASKS = 10
"""Failed tasks that the overview shows."""


def runs_page(viewer: Viewer, request: Request) -> Response:
    """All runs side by side, also those that have come since."""
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
    told = "|".join(f"{name} {run.stamp} {run.state}" for name, run in list(viewer.runs.items()))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def overview_page(viewer: Viewer, request: Request) -> Response:
    """A run at a glance."""
    run = viewer.run(request)
    page = first_page(run, FAILED_TASKS)
    # An evaluation of `cotune eval` has its own tasks. Beside its figures, those of training's evaluations would look
    # like the same ones with other values; the page of curves has them.
    evaluation = page.headline.evaluation
    in_training = evaluation is None or evaluation.name.startswith(IN_TRAINING)
    return viewer.page(
        request,
        "overview.html",
        run,
        facts=facts(run),
        page=page,
        troubles=troubles(run, of_calls=False),
        ending=ending(run),
        charts=first_charts(charts([run]), held_out=in_training),
        learned=learned(run),
        latest=newest(run, EVERYTHING, 8),
    )


def use_part(viewer: Viewer, request: Request) -> Response:
    """The use of calls by role: read after the page is there, as it sums over all calls."""
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
    names, found = [one.name for one in shown], charts(shown)
    if asked := request.query_params.get("csv"):
        chart = next((chart for chart in found if chart.id == asked), None)
        if chart is None:
            raise HTTPException(404, f"There is no chart {asked[:100]} here.")
        return chart_as_csv(chart)
    return viewer.page(request, "curves.html", run, charts=found, shown=names)


def configuration_page(viewer: Viewer, request: Request) -> Response:
    """The configuration of runs, and where they differ."""
    run, shown = viewer.chosen(request)
    only = len(shown) > 1 and "all" not in request.query_params
    set_only = "set" in request.query_params
    headlines = [one.headline.changes for one in shown]
    groups = grouped([settings(one) for one in shown], viewer.fields, only=only, set_only=set_only)
    return viewer.page(
        request,
        "compare.html",
        run,
        groups=groups,
        shown=shown,
        only=only,
        set_only=set_only,
        headlines=headlines,
        figures=list(dict.fromkeys(change.name for changes in headlines for change in changes)),
    )


class ShownField(msgspec.Struct, frozen=True, kw_only=True):
    """A field: its value in each run, and whether they differ; its default and its help, where it is documented;
    `changed` says of each value whether it is another than the default."""

    name: str
    values: tuple[str, ...]
    differs: bool
    default: str
    help: str
    changed: tuple[bool, ...]


def grouped(
    tables: Sequence[Mapping[str, str]], fields: Mapping[str, KnownField], *, only: bool, set_only: bool
) -> dict[str, list[ShownField]]:
    """The fields of runs by the tables of the documentation, in its order: with `only` those that differ between the
    runs, with `set_only` those that are not at their default."""
    order = {name: place for place, name in enumerate(fields)}
    heads = list(dict.fromkeys(name.rpartition(".")[0] for name in fields))
    found: dict[str, list[ShownField]] = {}
    for name in sorted({name for table in tables for name in table}, key=lambda name: (order.get(name, 10**6), name)):
        known = fields.get(name)
        values = tuple(table.get(name, "–") for table in tables)
        changed = tuple(known is not None and value not in (known.default, "–") for value in values)
        differs = len(set(values)) > 1
        if (only and not differs) or (set_only and known is not None and not any(changed)):
            continue
        head = next((one for one in reversed(heads) if one and name.startswith(f"{one}.")), "")
        head = head or (name.partition(".")[0] if "." in name else "")
        shown = ShownField(
            name=name,
            values=values,
            differs=differs,
            default=known.default if known else "",
            help=known.help if known else "",
            changed=changed,
        )
        found.setdefault(head, []).append(shown)
    last = ("versions", "changes")
    places = {head: (head in last, heads.index(head) if head in heads else len(heads)) for head in found}
    return dict(sorted(found.items(), key=lambda item: places[item[0]]))


def settings(run: OpenedRun) -> dict[str, str]:
    """Every field of a run's configuration, and its model, tasks, workflow and versions of packages."""
    told = run.description
    table: dict[str, Any] = {**(told.get("config") or {})}
    table |= {name: told[name] for name in ("workflow", "tasks", "versions", "changes") if told.get(name)}
    texts = ((n, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for n, v in leaves(table))
    return {name: text or "–" for name, text in texts}
