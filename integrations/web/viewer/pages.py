"""The pages of the viewer and their addresses."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from cotune.algorithms.filters import REASONS
from cotune.errors import CotuneError, RecordError
from cotune.integrations.web.http.requests import json_response
from cotune.integrations.web.viewer import episode as episodes_of
from cotune.integrations.web.viewer import evaluations as evaluated
from cotune.integrations.web.viewer import queries
from cotune.integrations.web.viewer.access import guarded
from cotune.integrations.web.viewer.curves import charts, first_charts
from cotune.integrations.web.viewer.opened import OpenedRun
from cotune.integrations.web.viewer.overview import (
    Prices,
    Totals,
    ending,
    facts,
    learned,
    prices_of,
    rolled_back,
    total_cost,
    troubles,
)
from cotune.integrations.web.viewer.rendering import address, asset, doing, hues, plain, render
from cotune.integrations.web.viewer.settings import settings
from cotune.integrations.web.viewer.step_groups import (
    MOST_EPISODES,
    ShownGroup,
    StepGroups,
    by_role_and_turn,
    step_groups,
)
from cotune.integrations.web.viewer.tasks import selected_path, tasks
from cotune.integrations.web.viewer.timeline import timeline
from cotune.integrations.web.viewer.tokens import shown_tokens
from cotune.reading.headline import DISTILL

TYPES = {"css": "text/css", "js": "text/javascript"}
ASSETS = {name: TYPES[name.rpartition(".")[2]] for name in ("viewer.css", "uplot.css", "uplot.js", "viewer.js")}
MOST_GROUPS = 60
"""Groups on a page."""
MOST_SIBLINGS = 48
"""Candidates of a group on its page."""
_KEPT_STEPS = 4


class Viewer:
    """The runs that are looked at, and what is remembered of them between two pages."""

    def __init__(self, runs: list[OpenedRun], prices: Prices) -> None:
        self.runs = {run.name: run for run in runs}
        self.prices = prices
        self._totals: dict[str, Totals] = {}
        self._steps: OrderedDict[tuple[Any, ...], StepGroups] = OrderedDict()
        self._lock = Lock()

    def run(self, request: Request) -> OpenedRun:
        """The run that an address names. Raises HTTPException (404)."""
        return self.named(request.path_params["run"])

    def named(self, name: str) -> OpenedRun:
        """Raises HTTPException (404) for a run that is not shown."""
        if name in self.runs:
            return self.runs[name]
        whole, _, folder = name.rpartition(":")
        part = self.runs[whole].part(folder) if whole in self.runs else None
        if part is None:
            raise HTTPException(404, f"There is no run {name} here.")
        return part

    def chosen(self, request: Request) -> list[OpenedRun]:
        """The runs that `run` parameters name; all where there are none."""
        names = request.query_params.getlist("run")
        return [self.named(name) for name in names] or list(self.runs.values())

    def groups(self, run: OpenedRun, step: int | None) -> StepGroups:
        """Groups of a step (as records number it, from 0); those of the latest pages are kept."""
        key = (run.name, step, run.stamp)
        with self._lock:
            if key in self._steps:
                self._steps.move_to_end(key)
                return self._steps[key]
            found = self._steps[key] = step_groups(run, step)
            while len(self._steps) > _KEPT_STEPS:
                self._steps.popitem(last=False)
            return found

    def page(self, template: str, run: OpenedRun | None = None, **values: Any) -> Response:
        """A page with what all pages have."""
        about = {
            "runs": self.runs,
            "run": run,
            "state": run.state if run else "",
            "here": template.removesuffix(".html"),
            "samples": run is None or learned(run) is None,
        }
        stamp = run.stamp if run else ""
        return HTMLResponse(render(template, **about, stamp=stamp, **values))

    def index(self, request: Request) -> Response:
        """Runs beside each other."""
        if len(self.runs) == 1 and "all" not in request.query_params:
            return RedirectResponse(address("run", next(iter(self.runs))))
        rows = [(run, facts(run), run.headline.changes[:3]) for run in self.runs.values()]
        return self.page("runs.html", rows=rows)

    def overview(self, request: Request) -> Response:
        """What a run comes to."""
        run = self.run(request)
        return self.page(
            "overview.html",
            run,
            facts=facts(run),
            headline=run.headline,
            troubles=troubles(run),
            ending=ending(run),
            charts=first_charts(charts([run])),
            learned=learned(run),
            latest=queries.episodes(run, queries.Filters()).rows[:8],
        )

    def use(self, request: Request) -> Response:
        """What the calls took, by role: read after the page is there, as it sums over all calls."""
        run = self.run(request)
        totals = self._totals.setdefault(run.name, Totals(run))
        uses = totals.by_role(prices_of(run, self.prices))
        template = "use_of_run.html" if "sum" in request.query_params else "use.html"
        return HTMLResponse(
            render(template, uses=uses, total=total_cost(uses), hues=hues({*queries.roles(run), *uses}))
        )

    def curves(self, request: Request) -> Response:
        """Curves of a run, or of several over each other."""
        run = self.named(request.path_params["run"]) if "run" in request.path_params else None
        shown = [run] if run else self.chosen(request)
        found = charts(shown)
        back = [text for one in shown for text in rolled_back(one)]
        return self.page("curves.html", run, charts=found, shown=[run.name for run in shown], rolled_back=back)

    def compare(self, request: Request) -> Response:
        """The configuration of runs, and where they differ."""
        run = self.named(request.path_params["run"]) if "run" in request.path_params else None
        shown = [run] if run else self.chosen(request)
        found = settings(shown)
        only = len(shown) > 1 and "all" not in request.query_params
        rows = [setting for setting in found if setting.differs or not only]
        headlines = [one.headline.changes for one in shown]
        names = list(dict.fromkeys(change.name for changes in headlines for change in changes))
        return self.page("compare.html", run, rows=rows, shown=shown, only=only, headlines=headlines, figures=names)

    def evaluations(self, request: Request) -> Response:
        """An evaluation of the run: its modes side by side, and task by task."""
        run, asked = self.run(request), request.query_params
        evaluation = evaluated.chosen(run.evaluations, asked.get("name", ""))
        start = max(0, _whole(asked.get("from")) or 0)
        pair = (asked.get("mode", ""), asked.get("against", ""))
        return self.page(
            "evaluations.html",
            run,
            evaluations=run.evaluations,
            shown=evaluated.show_evaluation(run, evaluation, pair, start) if evaluation else None,
            start=start,
            size=evaluated.PAGE,
        )

    def episodes(self, request: Request) -> Response:
        """The list of episodes, filtered and searched."""
        run, asked = self.run(request), request.query_params
        filters = queries.Filters(
            q=asked.get("q", "").strip(),
            step=_whole(asked.get("step")),
            low=_number(asked.get("low")),
            high=_number(asked.get("high")),
            **{name: asked.get(name, "") for name in ("phase", "status", "role", "task")},
        )
        before = asked.get("before", "")
        return self.page(
            "episodes.html",
            run,
            filters=filters,
            before=before,
            page=queries.episodes(run, filters, before),
            choices=queries.choices(run),
            open=queries.open_episodes(run) if not before and not filters.query() else [],
        )

    def episode(self, request: Request) -> Response:
        """One episode."""
        run, id = self.run(request), request.path_params["id"]
        found = episodes_of.find_episode(run, id)
        timed = episodes_of.timed_calls(run, id)
        start = max(0, _whole(request.query_params.get("from")) or 0)
        calls, broken = episodes_of.page_of_calls(run, id, start)
        trained = found is not None and found.phase == "train" and found.training_step is not None
        groups = self.groups(run, found.training_step) if trained and found else None
        shown = episodes_of.show_calls(run, calls, {call.id: call.step for call in timed}, groups)
        assert run.store is not None
        older, newer = queries.neighbours(run, id)
        return self.page(
            "episode.html",
            run,
            id=id,
            episode=found,
            outcome=run.store.rewards([id])[id],
            timeline=timeline(episodes_of.with_reads(timed, shown)),
            hues=hues({*queries.roles(run), *(call.role for call in timed), *(call.record.role for call in shown)}),
            calls=shown,
            groups=groups,
            total=len(timed),
            start=start,
            size=episodes_of.PAGE,
            broken=broken,
            older=older,
            newer=newer,
        )

    def call(self, request: Request) -> Response:
        """One call with its whole prompt; with `tokens`, its answers token by token."""
        run = self.run(request)
        record = episodes_of.find_call(run, request.path_params["id"])
        found = episodes_of.find_episode(run, record.episode)
        trained = found is not None and found.phase == "train" and found.training_step is not None
        groups = self.groups(run, found.training_step) if trained and found else None
        steps = {call.id: call.step for call in episodes_of.timed_calls(run, record.episode)}
        (call,) = episodes_of.show_calls(run, [record], steps, groups, whole=True)
        model = str(run.description.get("model") or "")
        coloured = "tokens" in request.query_params
        tokens = {
            c.index: shown_tokens(c, model)
            for c in record.candidates
            if coloured and c.logprobs and len(c.logprobs) == len(c.token_ids)
        }
        tools = episodes_of.message(run, record.tools) if record.tools else None
        return self.page(
            "call.html",
            run,
            call=call,
            episode=found,
            groups=groups,
            tokens=tokens,
            coloured=coloured,
            tools=tools,
            hues=hues({*queries.roles(run), record.role}),
        )

    def group_list(self, request: Request) -> Response:
        """The groups of a step by role and turn, and what was left out."""
        run, asked = self.run(request), request.query_params
        steps = queries.training_steps(run)
        step = _whole(asked.get("step"))
        step = step if step in steps else steps[-1] if steps else None
        at = None if step is None else step - 1
        found = self.groups(run, at)
        line = next((line for line in run.metrics if line["step"] == at), None)
        role, kind = asked.get("role", ""), asked.get("kind", "")
        chosen = [group for group in found.groups if _wanted(group, role, kind)]
        start = max(0, _whole(asked.get("from")) or 0)
        return self.page(
            "groups.html",
            run,
            steps=steps,
            step=step,
            taught=run.config.get("recipe") == DISTILL,
            found=found,
            left_out=line["left_out"] if line else found.left_out,
            candidates=line["rows"] + sum(line["left_out"].values()) if line else found.candidates,
            reasons=REASONS,
            cells=by_role_and_turn(found.groups),
            groups=chosen[start : start + MOST_GROUPS],
            total=len(chosen),
            start=start,
            size=MOST_GROUPS,
            most=MOST_EPISODES,
            role=role,
            kind=kind,
            hues=hues({*queries.roles(run), *(group.role for group in found.groups)}),
            roles=sorted({group.role for group in found.groups}),
        )

    def group(self, request: Request) -> Response:
        """One group: candidates of one comparison beside each other."""
        run, id = self.run(request), request.path_params["id"]
        step = _whole(request.query_params.get("step"))
        found = self.groups(run, None if step is None else step - 1)
        group = next((group for group in found.groups if group.id == id), None)
        if group is None:
            raise HTTPException(
                404, f"Step {step} has no group {id}: its candidates may have been left out one by one."
            )
        shown, calls = [], {}
        for sample, reward in list(zip(group.samples, group.rewards, strict=True))[:MOST_SIBLINGS]:
            if sample.call not in calls:
                record = episodes_of.find_call(run, sample.call)
                (calls[sample.call],) = episodes_of.show_calls(run, [record], {}, found, whole=True)
            candidate = next(c for c in calls[sample.call].candidates if c.id == sample.id)
            shown.append((sample, reward, candidate))
        first = calls[group.samples[0].call]
        one_prompt = len({sample.prompt for sample in group.samples}) == 1
        return self.page(
            "group.html", run, group=group, step=step, shown=shown, call=first, one_prompt=one_prompt, reasons=REASONS
        )

    def task_list(self, request: Request) -> Response:
        """Success by task over steps."""
        run, asked = self.run(request), request.query_params
        phases = queries.choices(run)["phase"]
        usual = "train" if "train" in phases else phases[0] if phases else ""
        phase = asked.get("phase") or usual
        kind = asked.get("kind", "")
        return self.page(
            "tasks.html",
            run,
            found=tasks(run, phase, kind, asked.get("after", "")),
            path=selected_path(run) if phase == "train" else "",
            phase=phase,
            phases=phases,
            kind=kind,
        )

    def changed(self, request: Request) -> Response:
        """A text that changes when the run goes on, and what it does at this moment."""
        run = self.run(request)
        return json_response({"stamp": run.stamp, "state": run.state, "now": plain(doing(run.now))})


def build_app(runs: list[OpenedRun], token: str | None = None, prices: Prices | None = None) -> Any:
    """The ASGI application over opened runs. With a `token`, every page needs it."""
    viewer = Viewer(runs, prices or {})
    pages: Mapping[str, Callable[[Request], Response]] = {
        "/": viewer.index,
        "/curves": viewer.curves,
        "/compare": viewer.compare,
        "/run/{run}": viewer.overview,
        "/run/{run}/use": viewer.use,
        "/run/{run}/changed": viewer.changed,
        "/run/{run}/curves": viewer.curves,
        "/run/{run}/evaluations": viewer.evaluations,
        "/run/{run}/episodes": viewer.episodes,
        "/run/{run}/episode/{id:path}": viewer.episode,
        "/run/{run}/call/{id:path}": viewer.call,
        "/run/{run}/groups": viewer.group_list,
        "/run/{run}/group/{id:path}": viewer.group,
        "/run/{run}/tasks": viewer.task_list,
        "/run/{run}/config": viewer.compare,
        "/static/{name}": _static,
    }
    handlers: Any = {kind: functools.partial(_failed, viewer) for kind in (HTTPException, CotuneError, Exception)}
    app = Starlette(routes=[Route(path, page) for path, page in pages.items()], exception_handlers=handlers)
    app.router.redirect_slashes = False
    return guarded(app, token)


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        raise HTTPException(404, f"There is no file {name} here.")
    return Response(asset(name), media_type=ASSETS[name], headers={"cache-control": "max-age=3600"})


def _failed(viewer: Viewer, request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404 if isinstance(error, RecordError) else 500
    known = (
        str(error)
        if isinstance(error, CotuneError)
        else f"The server failed: {type(error).__name__}. Its log says more."
    )
    text = error.detail if isinstance(error, HTTPException) else known
    page = render(
        "error.html", runs=viewer.runs, run=None, state="", here="", samples=True, stamp="", text=text, status=status
    )
    return HTMLResponse(page, status)


def _wanted(group: ShownGroup, role: str, kind: str) -> bool:
    return (not role or group.role == role) and (not kind or (kind == "left_out") == bool(group.reason))


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.lstrip("-").isdecimal() and len(text) < 10 else None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
