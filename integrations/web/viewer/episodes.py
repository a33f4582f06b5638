"""The page of episodes: a part of the list at a time, by id, so that none costs more in a long run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cotune.integrations.web.viewer.viewer import Viewer, hues, whole
from cotune.reading.run import OpenedRun
from cotune.storage.episode_filters import EpisodeFilters
from cotune.tables import first_line

PAGE = 50
"""Episodes of a page."""
SEARCH_SECONDS = 0.6
"""How long one page searches in texts before it says how far it came."""
CHUNK = 200
"""Episodes whose texts are searched at a time."""


class Filters(EpisodeFilters, frozen=True, kw_only=True):
    """Which episodes; `q` is text that a prompt or an answer holds."""

    q: str = ""

    def query(self, **changes: Any) -> dict[str, str]:
        """As parameters of an address."""
        fields = {**msgspec.structs.asdict(self), **changes}
        return {name: str(value) for name, value in fields.items() if value not in ("", None)}


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the list of episodes. `step` counts from 1, as on every page."""

    id: str
    task: str
    phase: str
    step: int | None
    status: str
    calls: int
    latency: float
    error: str
    success: int | None
    rewards: Mapping[str, float]


class EpisodePage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of episodes, the newest first. `after` leads to the next page; `searched` tells how far texts were
    searched where it is not the end."""

    rows: tuple[EpisodeRow, ...]
    after: str = ""
    searched: int | None = None


def episodes_page(viewer: Viewer, request: Request) -> Response:
    """The list of episodes, filtered and searched."""
    run, asked = viewer.run(request), request.query_params
    filters = Filters(
        q=asked.get("q", "").strip(),
        step=whole(asked.get("step")),
        low=_number(asked.get("low")),
        high=_number(asked.get("high")),
        **{name: asked.get(name, "") for name in ("phase", "status", "role", "task")},
    )
    before = asked.get("before", "")
    return viewer.page(
        request,
        "episodes.html",
        run,
        filters=filters,
        before=before,
        page=listed(run, filters, before),
        choices={"phase": run.store.phases(), "role": list(hues(run))},
        open=run.store.open_episodes(20) if not before and not filters.query() else [],
    )


def listed(run: OpenedRun, filters: Filters, before: str = "") -> EpisodePage:
    """The page of episodes that begins below the id `before`."""
    if filters.q:
        return _searched(run, filters, before)
    found = run.store.episode_lines(msgspec.structs.replace(filters, before=before), PAGE + 1)
    return EpisodePage(rows=_rows(run, found[:PAGE]), after=found[PAGE - 1][0] if len(found) > PAGE else "")


def _rows(run: OpenedRun, found: list[Any]) -> tuple[EpisodeRow, ...]:
    rewards = run.store.rewards(id for id, *_ in found)
    return tuple(
        EpisodeRow(
            id=str(id),
            task=str(task),
            phase=str(phase),
            step=None if step is None else step + 1,
            status=str(status),
            calls=calls,
            latency=latency,
            error="" if status == "ok" else first_line(error),
            success=success,
            rewards=rewards.get(id, {}),
        )
        for id, task, phase, step, status, calls, latency, error, success in found
    )


def _searched(run: OpenedRun, filters: Filters, before: str) -> EpisodePage:
    """Episodes in which a message, an answer, an error or the task's input holds the text, a chunk at a time."""
    found: list[Any] = []
    verdicts: dict[str, bool] = {}
    deadline, searched, last = time.monotonic() + SEARCH_SECONDS, 0, before
    while True:
        chunk = run.store.episode_lines(msgspec.structs.replace(filters, before=last), CHUNK)
        hits = run.store.holding(filters.q, [row[0] for row in chunk], verdicts)
        for row in chunk:
            searched, last = searched + 1, row[0]
            if row[0] in hits:
                found.append(row)
            if len(found) == PAGE:
                return EpisodePage(rows=_rows(run, found), after=last)
        if len(chunk) < CHUNK:
            return EpisodePage(rows=_rows(run, found))
        if time.monotonic() > deadline:
            return EpisodePage(rows=_rows(run, found), after=last, searched=searched)


def _number(text: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text) if text else None
    return None
