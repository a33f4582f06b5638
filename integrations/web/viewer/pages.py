"""The table of the viewer's pages, and the application that serves them.

A new page needs a file, a template and a line in `PAGES`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cotune.errors import CotuneError, RecordError
from cotune.integrations.web.viewer.access import guarded
from cotune.integrations.web.viewer.blame import blame_page
from cotune.integrations.web.viewer.calls import calls_page
from cotune.integrations.web.viewer.diff import diff_page
from cotune.integrations.web.viewer.episode import call_page, episode_page
from cotune.integrations.web.viewer.episodes import episodes_page
from cotune.integrations.web.viewer.evaluations import evaluations_page
from cotune.integrations.web.viewer.groups import group_page, groups_page
from cotune.integrations.web.viewer.notes import note_part, notes_page
from cotune.integrations.web.viewer.overview import (
    changed_part,
    configuration_page,
    curves_page,
    overview_page,
    runs_changed_part,
    runs_page,
    use_part,
)
from cotune.integrations.web.viewer.rendering import asset
from cotune.integrations.web.viewer.tasks import tasks_page
from cotune.integrations.web.viewer.viewer import KnownField, Page, Viewer
from cotune.reading.find_runs import FoundRuns
from cotune.records.prices import Prices

PAGES = (
    Page("/", runs_page, "Runs"),
    Page("/changed", runs_changed_part),
    Page("/curves", curves_page, "Curves"),
    Page("/compare", configuration_page, "Configuration"),
    Page("/run/{run}", overview_page, "Overview"),
    Page("/run/{run}/use", use_part),
    Page("/run/{run}/changed", changed_part),
    Page("/run/{run}/curves", curves_page, "Curves"),
    Page("/run/{run}/evaluations", evaluations_page, "Evaluations"),
    Page("/run/{run}/blame", blame_page, "Blame", analysed=True),
    Page("/run/{run}/episodes", episodes_page, "Episodes", sampled=True),
    Page("/run/{run}/episode/{id:path}", episode_page, "Episodes"),
    Page("/run/{run}/calls", calls_page, "Calls", sampled=True),
    Page("/run/{run}/call/{id:path}", call_page, "Calls"),
    Page("/run/{run}/diff", diff_page, "Calls"),
    Page("/run/{run}/notes", notes_page, "Calls"),
    Page("/run/{run}/note", note_part, method="POST"),
    Page("/run/{run}/groups", groups_page, "Groups", sampled=True),
    Page("/run/{run}/group/{id:path}", group_page, "Groups"),
    Page("/run/{run}/tasks", tasks_page, "Tasks", sampled=True),
    Page("/run/{run}/config", configuration_page, "Configuration"),
)
ASSETS = {"viewer.css": "text/css", "uplot.css": "text/css"}
ASSETS |= {"viewer.js": "text/javascript", "uplot.js": "text/javascript"}


def build_app(
    runs: FoundRuns,
    token: str | None = None,
    prices: Prices | None = None,
    fields: Mapping[str, KnownField] = MappingProxyType({}),
) -> Any:
    """The ASGI application over opened runs. With a `token`, every page needs it."""
    viewer = Viewer(runs, prices or {}, PAGES, fields)
    routes = [Route(page.path, _endpoint(viewer, page), methods=[page.method]) for page in PAGES]
    handlers: Any = {kind: functools.partial(_failed, viewer) for kind in (HTTPException, CotuneError, Exception)}
    app = Starlette(routes=[*routes, Route("/static/{name}", _static)], exception_handlers=handlers)
    app.router.redirect_slashes = False
    return guarded(app, token)


def _endpoint(viewer: Viewer, page: Page) -> Any:
    """The function that answers requests for a page. Starlette runs it in a thread, unless it is asynchronous."""
    if inspect.iscoroutinefunction(page.answer):
        return functools.partial(page.answer, viewer)

    def answer(request: Request) -> Any:
        request.state.tab = page.tab
        return page.answer(viewer, request)

    return answer


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        raise HTTPException(404, f"There is no file {name} here.")
    return Response(asset(name), media_type=ASSETS[name], headers={"cache-control": "max-age=3600"})


def _failed(viewer: Viewer, request: Request, error: Exception) -> Response:
    """The page that shows an error, with its HTTP status."""
    if isinstance(error, HTTPException):
        status = error.status_code
        text = error.detail
    elif isinstance(error, CotuneError):
        status = 404 if isinstance(error, RecordError) else 500
        text = str(error)
    else:
        status = 500
        text = f"The server failed: {type(error).__name__}. Its log says more."
    request.state.tab = ""
    page = viewer.page(request, "error.html", text=text, status=status)
    page.status_code = status
    return page
