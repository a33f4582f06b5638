"""The page of episodes: a part of the list at a time, by id, so that none costs more in a long run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cotune.integrations.web.viewer.calls import SEARCH_SECONDS, ListPage, Match, match_in_call, match_in_episode
from cotune.integrations.web.viewer.viewer import Viewer, hues, whole
from cotune.reading.exchange import Exchange, beginning, exchanges
from cotune.reading.run import OpenedRun
from cotune.storage.episode_filters import ORDERS, EpisodeFilters
from cotune.storage.sql.figures import EpisodeLine
from cotune.tables import first_line

PAGE = 50
"""Episodes of a page."""
CHUNK = 200
"""Episodes whose texts are searched at a time."""


class Filters(EpisodeFilters, frozen=True, kw_only=True):
    """Which episodes; `q` is text that a prompt or an answer holds, `order` one of ORDERS."""

    q: str = ""
    order: str = ""

    @property
    def step(self) -> int | None:
        """The training step, from 1 as on every page."""
        return None if self.training_step is None else self.training_step + 1

    def query(self, **changes: Any) -> dict[str, str]:
        """As parameters of an address."""
        fields = {**msgspec.structs.asdict(self), "training_step": self.step, **changes}
        return {name.removeprefix("training_"): str(value) for name, value in fields.items() if value not in ("", None)}


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the list of episodes. `step` counts from 1, as on every page. `question` and `answer` are their
    beginnings."""

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
    question: str
    answer: str
    match: Match | None = None


def episodes_page(viewer: Viewer, request: Request) -> Response:
    """The list of episodes, filtered and searched."""
    run, asked = viewer.run(request), request.query_params
    order, step = asked.get("order", ""), whole(asked.get("step"))
    filters = Filters(
        q=asked.get("q", "").strip(),
        order=order if order in ORDERS else "",
        phase=asked.get("phase", ""),
        status=asked.get("status", ""),
        role=asked.get("role", ""),
        task=asked.get("task", ""),
        solved=asked.get("solved", ""),
        training_step=None if step is None else step - 1,
        low=_number(asked.get("low")),
        high=_number(asked.get("high")),
    )
    before = asked.get("before", "")
    return viewer.page(
        request,
        "episodes.html",
        run,
        filters=filters,
        before=before,
        page=listed(run, filters, before),
        orders={name: text for name, (text, _) in ORDERS.items()},
        choices={"phase": run.figures.phases(), "role": list(hues(run))},
        open=run.figures.open_episodes(20) if not before and not filters.query() else [],
    )


def listed(run: OpenedRun, filters: Filters, before: str = "") -> ListPage[EpisodeRow]:
    """The page of episodes that begins at `before`: below that id, or in another order after so many."""
    if filters.q:
        return _searched(run, filters, before)
    found = _lines(run, filters, before, PAGE + 1)
    return ListPage(rows=_rows(run, found[:PAGE]), after=_after(filters, before, found[:PAGE], more=len(found) > PAGE))


def newest(run: OpenedRun, filters: EpisodeFilters, limit: int) -> tuple[EpisodeRow, ...]:
    """The newest episodes that fit."""
    return _rows(run, run.figures.episode_lines(filters, limit))


def _lines(run: OpenedRun, filters: Filters, before: str, limit: int) -> list[EpisodeLine]:
    if filters.order:
        return run.figures.episode_lines(filters, limit, filters.order, whole(before) or 0)
    return run.figures.episode_lines(msgspec.structs.replace(filters, before=before), limit)


def _after(filters: Filters, before: str, shown: list[EpisodeLine], *, more: bool) -> str:
    """Where the next page begins; empty where there is no more."""
    if not more or not shown:
        return ""
    return str((whole(before) or 0) + len(shown)) if filters.order else str(shown[-1].id)


def _rows(
    run: OpenedRun, found: list[EpisodeLine], matches: Mapping[str, Match | None] = MappingProxyType({})
) -> tuple[EpisodeRow, ...]:
    ids = [line.id for line in found]
    rewards, texts = run.store.rewards(ids), exchanges(run.store, ids)
    rows = []
    for line in found:
        exchange = texts.get(line.id, Exchange())
        rows.append(
            EpisodeRow(
                id=str(line.id),
                task=str(line.task),
                phase=str(line.phase),
                step=None if line.training_step is None else line.training_step + 1,
                status=str(line.status),
                calls=line.calls,
                latency=line.seconds,
                error="" if line.status == "ok" else first_line(line.error),
                success=line.solved,
                rewards=rewards.get(line.id, {}),
                question=beginning(exchange.question),
                answer=beginning(exchange.answer),
                match=matches.get(line.id),
            )
        )
    return tuple(rows)


def _searched(run: OpenedRun, filters: Filters, before: str) -> ListPage[EpisodeRow]:
    """Episodes in which a message, an answer, an error or the task's input holds the text, a chunk at a time."""
    found: list[EpisodeLine] = []
    matches: dict[str, Match | None] = {}
    verdicts: dict[str, bool] = {}
    deadline, searched, last = time.monotonic() + SEARCH_SECONDS, 0, before
    while True:
        chunk = _lines(run, filters, last, CHUNK)
        hits = run.figures.holding(filters.q, [row.id for row in chunk], verdicts)
        for place, row in enumerate(chunk):
            if call := hits.get(row.id):
                matches[row.id] = match_in_call(run, call, filters.q)
            elif row.id in hits:
                matches[row.id] = match_in_episode(run, row.id, filters.q)
            found += [row] if row.id in hits else []
            if len(found) == PAGE:
                return ListPage(
                    rows=_rows(run, found, matches), after=_after(filters, last, chunk[: place + 1], more=True)
                )
        searched += len(chunk)
        if len(chunk) < CHUNK:
            return ListPage(rows=_rows(run, found, matches))
        last = _after(filters, last, chunk, more=True)
        if time.monotonic() > deadline:
            return ListPage(rows=_rows(run, found, matches), after=last, searched=searched)


def _number(text: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text) if text else None
    return None
