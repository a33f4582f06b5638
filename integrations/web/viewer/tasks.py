"""The page of tasks, with the success of each task over the steps."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cotune.integrations.web.viewer.viewer import Viewer
from cotune.reading.tasks import selected_path, tasks


def tasks_page(viewer: Viewer, request: Request) -> Response:
    """The page of tasks, with the success of each task over the steps. It shows one phase, by default the training."""
    run = viewer.run(request)
    query = request.query_params
    phases = run.figures.phases()
    phase = query.get("phase")
    if not phase:
        phase = "train" if "train" in phases else next(iter(phases), "")
    kind = query.get("kind", "")  # "never", "sometimes" or "always" solved
    order = query.get("order", "")
    page_of_tasks = tasks(run, phase, kind, query.get("after", ""), order)
    # Training may choose the best of several episodes of a task, which raises the shown success.
    path_of_training = selected_path(run) if phase == "train" else ""
    return viewer.page(
        request,
        "tasks.html",
        run,
        found=page_of_tasks,
        path=path_of_training,
        phase=phase,
        phases=phases,
        kind=kind,
        order=order,
    )
