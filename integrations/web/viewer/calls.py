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
"""Seconds that one page of a list searches. Then it shows how many entries were searched."""
CHUNK = 500
"""Calls that are read together."""
_AROUND = 60
"""Characters to show on each side of a match."""


class Match(msgspec.Struct, frozen=True):
    """A match of a search, with the text before and after it."""

    where: str
    """The part of the call or episode, such as "answer" or "error"."""
    before: str
    text: str
    after: str
    call: str = ""
    """Id of the call; empty for a match in the episode itself."""


class CallRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the list of calls. `training_step` counts from 1, as on every page. `phase` is empty for a call of an
    episode that has not ended."""

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
    """One page of a list."""

    rows: tuple[Row, ...]
    after: str = ""
    """Position of the next page; empty on the last one."""
    searched: int | None = None
    """Number of searched entries, if the time limit ended the search before the end of the list."""


def calls_page(viewer: Viewer, request: Request) -> Response:
    """The list of calls, filtered and searched."""
    run = viewer.run(request)
    asked = request.query_params
    filters = CallFilters(
        turn=whole(asked.get("turn")),
        step=whole(asked.get("step")),
        **{name: asked.get(name, "") for name in ("role", "status", "phase", "task")},
    )
    text = asked.get("q", "").strip()
    colours = hues(run)
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
    """The page of calls, the newest first, that begins below the id `before`. With `text`, only calls that contain it.

    Calls are read in chunks, until the page is full, the list ends, or `SEARCH_SECONDS` have passed.
    """
    rows: list[CallRow] = []
    text_in_message: dict[str, bool] = {}  # messages that were searched already, shared by all chunks
    deadline = time.monotonic() + SEARCH_SECONDS
    n_searched = 0
    last_id = before
    while True:
        ids_of_chunk = run.figures.call_ids(last_id, CHUNK)
        lines = run.figures.call_lines(ids_of_chunk, filters)  # of the calls that the filters accept
        ids_to_show = {line.id for line in lines}
        if text:
            ids_to_show = run.figures.calls_with_text(text, list(ids_to_show), text_in_message)
        for line in lines:
            if line.id in ids_to_show:
                rows.append(_row(run, line, text))
            if len(rows) == PAGE:
                return ListPage(rows=tuple(rows), after=rows[-1].id)
        n_searched += len(ids_of_chunk)
        if len(ids_of_chunk) < CHUNK:
            return ListPage(rows=tuple(rows))
        last_id = ids_of_chunk[-1]
        if time.monotonic() > deadline:
            return ListPage(rows=tuple(rows), after=last_id, searched=n_searched)


def _row(run: OpenedRun, line: CallLine, text: str) -> CallRow:
    """The row of a call in the table. Steps are counted from 1 on pages, from 0 in records."""
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
    """The first match of a text in a call: in its answers, its errors, its feedback, or its prompt, the latest message
    first."""
    try:
        call = run.figures.call(id)
    except RecordError:
        return None
    return _first_match(_texts_of_call(run, call), text, id)


def match_in_episode(run: OpenedRun, id: str, text: str) -> Match | None:
    """The first match of a text in an episode itself: in its task's input, its error or its feedback."""
    episode = run.store.episode(id)
    texts: list[tuple[str, Any]] = [("input", leaf) for leaf in leaves(episode.task.input)]
    texts.append(("error", episode.error))
    texts += [(f"why {name}", reason) for name, reason in run.store.feedback([id])[id].items()]
    return _first_match(texts, text, call="")


def _texts_of_call(run: OpenedRun, call: CallRecord) -> Iterator[tuple[str, Any]]:
    """The texts of a call, each with a label that a page shows, such as "answer".

    They are in the order in which a search looks for the first match: answers, errors, feedback, then the prompt from
    its end.
    """
    for candidate in call.candidates:
        label = "answer" if candidate.index == call.chosen else f"candidate {candidate.index}"
        for leaf in (candidate.text, *leaves(candidate.message)):
            yield label, leaf
    yield "error", call.error
    for attempt in call.attempts:
        yield "attempt", attempt
    candidate_ids = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
    for feedback in run.store.feedback(candidate_ids).values():
        for name, reason in feedback.items():
            yield f"why {name}", reason
    for message_id in reversed(call.messages):
        try:
            message = run.store.message(message_id)
        except RecordError:
            continue  # the message was lost
        role = str(message.get("role", "message")) if isinstance(message, dict) else "message"
        for leaf in leaves(message):
            yield f"prompt, {role}", leaf


def _first_match(labelled_texts: Iterable[tuple[str, Any]], searched_text: str, call: str) -> Match | None:
    """The first of `labelled_texts` that contains the searched text, with some characters around the match.

    Upper and lower case are the same, as in the search by SQL. Values that are no texts are skipped.
    """
    pattern = re.compile(re.escape(searched_text), re.IGNORECASE)
    for label, text in labelled_texts:
        match = pattern.search(text) if isinstance(text, str) else None
        if match:
            start, end = match.span()
            before_start = max(0, start - _AROUND)
            after_end = end + _AROUND
            before = ("…" if before_start > 0 else "") + text[before_start:start]
            after = text[end:after_end] + ("…" if len(text) > after_end else "")
            return Match(label, before, text[start:end], after, call)
    return None
