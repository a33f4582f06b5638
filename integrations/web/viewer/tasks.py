"""The page of tasks, with the success of each task over the steps."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cotune.integrations.web.viewer.viewer import Viewer
from cotune.reading.tasks import selected_path, tasks


def tasks_page(viewer: Viewer, request: Request) -> Response:
    """Success by task over steps."""
    run, asked = viewer.run(request), request.query_params
    phases = run.figures.phases()
    phase = asked.get("phase") or ("train" if "train" in phases else next(iter(phases), ""))
    kind, order = asked.get("kind", ""), asked.get("order", "")
    return viewer.page(
        request,
        "tasks.html",
        run,
        found=tasks(run, phase, kind, asked.get("after", ""), order),
        path=selected_path(run) if phase == "train" else "",
        phase=phase,
        phases=phases,
        kind=kind,
        order=order,
    )
