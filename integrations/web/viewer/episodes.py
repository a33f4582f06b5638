"""The page of episodes. It reads one part of the list, by id, so that a page of a long run costs no more."""

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
from cotune.reading.exchange import Exchange, exchanges, first_characters
from cotune.reading.run import OpenedRun
from cotune.storage.episode_filters import ORDERS, EpisodeFilters
from cotune.storage.sql.figures import EpisodeLine
from cotune.tables import first_line

PAGE = 50
"""Episodes of a page."""
CHUNK = 200
"""Episodes whose texts are searched at a time."""


class Filters(EpisodeFilters, frozen=True, kw_only=True):
    """The filters of the list. `q` is a text to search for in prompts and answers, `order` one of ORDERS."""

    q: str = ""
    order: str = ""

    @property
    def step(self) -> int | None:
        """The training step, from 1 as on every page."""
        return None if self.training_step is None else self.training_step + 1

    def query(self, **changes: Any) -> dict[str, str]:
        """The filters as parameters of an address."""
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
    run = viewer.run(request)
    query = request.query_params
    order = query.get("order", "")
    step = whole(query.get("step"))
    filters = Filters(
        q=query.get("q", "").strip(),
        order=order if order in ORDERS else "",
        phase=query.get("phase", ""),
        status=query.get("status", ""),
        role=query.get("role", ""),
        task=query.get("task", ""),
        solved=query.get("solved", ""),
        training_step=None if step is None else step - 1,
        low=_number(query.get("low")),
        high=_number(query.get("high")),
    )
    before = query.get("before", "")
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
    """The page of episodes that begins at `before`: an id or, in another order, a number of episodes."""
    if filters.q:
        return _search_episodes(run, filters, before)
    lines = _lines(run, filters, before, PAGE + 1)  # one more, to see whether there is a next page
    shown = lines[:PAGE]
    return ListPage(rows=_rows(run, shown), after=_after(filters, before, shown, more=len(lines) > PAGE))


def newest(run: OpenedRun, filters: EpisodeFilters, limit: int) -> tuple[EpisodeRow, ...]:
    """The newest episodes that fit."""
    return _rows(run, run.figures.episode_lines(filters, limit))


def _lines(run: OpenedRun, filters: Filters, before: str, limit: int) -> list[EpisodeLine]:
    if filters.order:
        return run.figures.episode_lines(filters, limit, filters.order, whole(before) or 0)
    return run.figures.episode_lines(msgspec.structs.replace(filters, before=before), limit)


def _after(filters: Filters, before: str, shown: list[EpisodeLine], *, more: bool) -> str:
    """Position of the next page; empty on the last one."""
    if not more or not shown:
        return ""
    return str((whole(before) or 0) + len(shown)) if filters.order else str(shown[-1].id)


def _rows(
    run: OpenedRun, lines: list[EpisodeLine], matches: Mapping[str, Match | None] = MappingProxyType({})
) -> tuple[EpisodeRow, ...]:
    """The rows of the table of episodes, with the beginnings of each task's question and of the episode's answer.

    `matches` has the passages that a search has matched, by episode.
    """
    ids = [line.id for line in lines]
    rewards = run.store.rewards(ids)
    question_and_answer = exchanges(run.store, ids)
    rows = []
    for line in lines:
        exchange = question_and_answer.get(line.id, Exchange())
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
                question=first_characters(exchange.question),
                answer=first_characters(exchange.answer),
                match=matches.get(line.id),
            )
        )
    return tuple(rows)


def _search_episodes(run: OpenedRun, filters: Filters, before: str) -> ListPage[EpisodeRow]:
    """The page of episodes with the searched text `filters.q` in a message, an answer, an error or the task's input.

    Episodes are searched in chunks, until the page is full, the list ends, or the search has taken `SEARCH_SECONDS`.
    """
    matching_lines: list[EpisodeLine] = []
    matches: dict[str, Match | None] = {}
    text_in_message: dict[str, bool] = {}  # messages that were searched already, shared by all chunks
    deadline = time.monotonic() + SEARCH_SECONDS
    n_searched = 0
    chunk_start = before
    while True:
        chunk = _lines(run, filters, chunk_start, CHUNK)
        # The id of each matching episode, with the id of the call that matches; empty if the episode itself does.
        call_of_hit = run.figures.episodes_with_text(filters.q, [line.id for line in chunk], text_in_message)
        for n_read, line in enumerate(chunk, start=1):
            if line.id not in call_of_hit:
                continue
            matching_lines.append(line)
            if call := call_of_hit[line.id]:
                matches[line.id] = match_in_call(run, call, filters.q)
            else:
                matches[line.id] = match_in_episode(run, line.id, filters.q)
            if len(matching_lines) == PAGE:
                # The next page begins within this chunk.
                next_start = _after(filters, chunk_start, chunk[:n_read], more=True)
                return ListPage(rows=_rows(run, matching_lines, matches), after=next_start)
        n_searched += len(chunk)
        if len(chunk) < CHUNK:
            return ListPage(rows=_rows(run, matching_lines, matches))
        chunk_start = _after(filters, chunk_start, chunk, more=True)
        if time.monotonic() > deadline:
            return ListPage(rows=_rows(run, matching_lines, matches), after=chunk_start, searched=n_searched)


def _number(text: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text) if text else None
    return None
