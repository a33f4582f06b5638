"""The page of calls: filtered and searched, with the place in each call that matched."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cotune.errors import RecordError
from cotune.integrations.web.viewer.viewer import Viewer, hues, whole
from cotune.json_values import leaves
from cotune.reading.run import OpenedRun
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord
from cotune.storage.episode_filters import CallFilters
from cotune.storage.sql.figures import CallLine

Row = TypeVar("Row")
PAGE = 50
"""Calls of a page."""
SEARCH_SECONDS = 0.6
"""How long one page of a list searches before it says how far it came."""
CHUNK = 500
"""Calls that are looked at together."""
_AROUND = 60
"""Characters that are shown on each side of a match."""


class Match(msgspec.Struct, frozen=True):
    """A text that was found: where, in `call` (empty for the episode itself), and with what around it."""

    where: str
    before: str
    text: str
    after: str
    call: str = ""


class CallRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the list of calls. `training_step` counts from 1, as on every page; `phase` is empty for a call of an
    episode without an end."""

    id: str
    episode: str
    step: int
    role: str
    turn: int
    status: str
    task: str
    phase: str
    training_step: int | None
    prompt_tokens: int
    answer_tokens: int
    latency: float
    policy: str
    match: Match | None = None


class ListPage(msgspec.Struct, Generic[Row], frozen=True, kw_only=True):
    """One page of a list. `after` leads to the next page; `searched` counts the entries that were searched if the time
    was up before the end of the list."""

    rows: tuple[Row, ...]
    after: str = ""
    searched: int | None = None


def calls_page(viewer: Viewer, request: Request) -> Response:
    """The list of calls, filtered and searched."""
    run, asked = viewer.run(request), request.query_params
    filters = CallFilters(
        turn=whole(asked.get("turn")),
        step=whole(asked.get("step")),
        **{name: asked.get(name, "") for name in ("role", "status", "phase", "task")},
    )
    text, colours = asked.get("q", "").strip(), hues(run)
    fields = {**msgspec.structs.asdict(filters), "q": text}
    return viewer.page(
        request,
        "calls.html",
        run,
        filters=filters,
        q=text,
        query={name: value for name, value in fields.items() if value not in ("", None)},
        page=listed_calls(run, filters, text, asked.get("before", "")),
        choices={"role": list(colours), "phase": run.figures.phases()},
        hues=colours,
    )


def listed_calls(run: OpenedRun, filters: CallFilters, text: str = "", before: str = "") -> ListPage[CallRow]:
    """The page of calls, the newest first, that begins below the id `before`."""
    found: list[CallRow] = []
    verdicts: dict[str, bool] = {}
    deadline, searched, last = time.monotonic() + SEARCH_SECONDS, 0, before
    while True:
        chunk = run.figures.call_ids(last, CHUNK)
        lines = run.figures.call_lines(chunk, filters)
        hits = {line.id for line in lines}
        if text:
            hits = run.figures.calls_holding(text, list(hits), verdicts)
        for line in lines:
            if line.id in hits:
                found.append(_row(run, line, text))
            if len(found) == PAGE:
                return ListPage(rows=tuple(found), after=found[-1].id)
        searched += len(chunk)
        if len(chunk) < CHUNK:
            return ListPage(rows=tuple(found))
        last = chunk[-1]
        if time.monotonic() > deadline:
            return ListPage(rows=tuple(found), after=last, searched=searched)


def _row(run: OpenedRun, line: CallLine, text: str) -> CallRow:
    return CallRow(
        id=str(line.id),
        episode=str(line.episode),
        step=line.step,
        role=str(line.role),
        turn=line.turn,
        status=str(line.status),
        task=str(line.task or ""),
        phase=str(line.phase or ""),
        training_step=None if line.training_step is None else line.training_step + 1,
        prompt_tokens=line.prompt_tokens,
        answer_tokens=line.answer_tokens,
        latency=line.seconds,
        policy=str(line.answered_by),
        match=match_in_call(run, str(line.id), text) if text else None,
    )


def match_in_call(run: OpenedRun, id: str, text: str) -> Match | None:
    """Where a call holds a text: in an answer, its error, its feedback, or the latest message of its prompt."""
    try:
        call = run.figures.call(id)
    except RecordError:
        return None
    return _first(_texts_of_call(run, call), text, id)


def match_in_episode(run: OpenedRun, id: str, text: str) -> Match | None:
    """Where an episode itself holds a text: in its task's input, its error or its feedback."""
    episode = run.store.episode(id)
    beside = run.store.feedback([id])[id]
    texts = [("input", leaf) for leaf in leaves(episode.task.input)]
    return _first([*texts, ("error", episode.error), *(("why " + n, said) for n, said in beside.items())], text, "")


def _texts_of_call(run: OpenedRun, call: CallRecord) -> Iterator[tuple[str, Any]]:
    for candidate in call.candidates:
        named = "answer" if candidate.index == call.chosen else f"candidate {candidate.index}"
        yield from ((named, leaf) for leaf in (candidate.text, *leaves(candidate.message)))
    yield from (("error", call.error), *(("attempt", attempt) for attempt in call.attempts))
    for said in run.store.feedback([candidate_id(call.id, c.index) for c in call.candidates]).values():
        yield from ((f"why {name}", why) for name, why in said.items())
    for message in reversed(call.messages):
        try:
            body = run.store.message(message)
        except RecordError:
            continue
        named = str(body.get("role", "message")) if isinstance(body, dict) else "message"
        yield from ((f"prompt, {named}", leaf) for leaf in leaves(body))


def _first(texts: Iterable[tuple[str, Any]], text: str, call: str) -> Match | None:
    """The first of some texts that holds one, as SQL finds it: small and large letters are the same."""
    for where, value in texts:
        found = re.search(re.escape(text), value, re.IGNORECASE) if isinstance(value, str) else None
        if found:
            (at, end), cut = found.span(), max(0, found.start() - _AROUND)
            before = ("…" if cut else "") + value[cut:at]
            after = value[end : end + _AROUND] + ("…" if len(value) > end + _AROUND else "")
            return Match(where, before, value[at:end], after, call)
    return None
