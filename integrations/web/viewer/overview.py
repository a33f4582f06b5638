"""The pages on whole runs: their list, one at a glance, curves, configuration."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from cotune.integrations.web.http.requests import json_response
from cotune.integrations.web.viewer import episodes
from cotune.integrations.web.viewer.rendering import address, doing, plain, render
from cotune.integrations.web.viewer.tables import chart_as_csv
from cotune.integrations.web.viewer.viewer import Viewer, hues
from cotune.reading.curves import charts, first_charts
from cotune.reading.facts import ending, facts, learned, troubles
from cotune.reading.run import OpenedRun
from cotune.reading.use import total_cost
from cotune.storage.run_layout import leaves


def runs_page(viewer: Viewer, request: Request) -> Response:
    """All runs side by side."""
    if len(viewer.runs) == 1 and "all" not in request.query_params:
        return RedirectResponse(address("run", next(iter(viewer.runs))))
    rows = [(run, facts(run), run.headline.changes[:3]) for run in viewer.runs.values()]
    return viewer.page(request, "runs.html", rows=rows)


def overview_page(viewer: Viewer, request: Request) -> Response:
    """A run at a glance."""
    run = viewer.run(request)
    return viewer.page(
        request,
        "overview.html",
        run,
        facts=facts(run),
        headline=run.headline,
        troubles=troubles(run, of_calls=False),
        ending=ending(run),
        charts=first_charts(charts([run])),
        learned=learned(run),
        latest=episodes.listed(run, episodes.Filters()).rows[:8],
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
    back = [back.text for one in shown for back in one.about.rollbacks]
    names, found = [one.name for one in shown], charts(shown)
    if asked := request.query_params.get("csv"):
        chart = next((chart for chart in found if chart.id == asked), None)
        if chart is None:
            raise HTTPException(404, f"There is no chart {asked[:100]} here.")
        return chart_as_csv(chart)
    return viewer.page(request, "curves.html", run, charts=found, shown=names, rolled_back=back)


def configuration_page(viewer: Viewer, request: Request) -> Response:
    """The configuration of runs, and where they differ."""
    run, shown = viewer.chosen(request)
    tables = [settings(one) for one in shown]
    names = sorted({name for table in tables for name in table}, key=lambda name: (name.startswith("versions."), name))
    rows = [(name, [table.get(name, "–") for table in tables]) for name in names]
    only = len(shown) > 1 and "all" not in request.query_params
    headlines = [one.headline.changes for one in shown]
    return viewer.page(
        request,
        "compare.html",
        run,
        rows=[(name, values, len(set(values)) > 1) for name, values in rows if not only or len(set(values)) > 1],
        shown=shown,
        only=only,
        headlines=headlines,
        figures=list(dict.fromkeys(change.name for changes in headlines for change in changes)),
    )


def settings(run: OpenedRun) -> dict[str, str]:
    """Every field of a run's configuration, and its model, tasks, workflow and versions of packages."""
    told = run.description
    table: dict[str, Any] = {**(told.get("config") or {})}
    table |= {name: told[name] for name in ("workflow", "tasks", "versions", "changes") if told.get(name)}
    texts = ((n, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for n, v in leaves(table))
    return {name: text or "–" for name, text in texts}
