"""Thumbs and notes of people: written from the page of a candidate, and listed."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cotune.errors import RecordError
from cotune.integrations.web.http.requests import BodyRoom, RequestError, decode_body, json_response, read_body, refusal
from cotune.integrations.web.viewer.chat import first_line
from cotune.integrations.web.viewer.viewer import Viewer
from cotune.reading.run import OpenedRun
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate
from cotune.storage.notes import LONGEST, Note, write_note
from cotune.storage.whole_file import system_error_message

_LARGEST = 64 << 10
"""Bytes of a request."""
_WHY = f"a note has at most {LONGEST:,} characters."


class GivenNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request: a thumb up (1) or down (-1), and a text; neither takes the note back."""

    id: str
    score: Annotated[int, msgspec.Meta(ge=-1, le=1)] | None = None
    note: Annotated[str, msgspec.Meta(max_length=LONGEST)] = ""


async def note_part(viewer: Viewer, request: Request) -> Response:
    """Keep a note. Who may write is checked before (`access`)."""
    try:
        body = await read_body(request.scope, request.receive, _LARGEST, BodyRoom(_LARGEST), _WHY)
        given = decode_body(body, GivenNote)
        kept = await asyncio.to_thread(_keep, viewer.run(request), given)
    except RequestError as error:
        return refusal(error)
    except RecordError as error:
        return refusal(RequestError(500, str(error)))
    return json_response(kept or Note(id=given.id))


def _keep(run: OpenedRun, given: GivenNote) -> Note | None:
    if _noted(run, given.id) is None:
        raise RequestError(404, f"{run.name} has no candidate and no episode {given.id[:100]}.")
    if run.notes_file is None:
        raise RequestError(409, "Notes are kept beside records in a folder, not beside a database.")
    note = Note(id=given.id, score=given.score or None, note=given.note.strip())
    try:
        return write_note(run.notes_file, note)
    except OSError as error:
        raise RequestError(500, system_error_message(error, "say it again")) from None


def notes_page(viewer: Viewer, request: Request) -> Response:
    """All notes of a run, the newest first, and how to use them."""
    run = viewer.run(request)
    rows = [(note, _told(_noted(run, note.id))) for note in reversed(list(run.notes.values()))]
    return viewer.page(
        request,
        "notes.html",
        run,
        file=run.notes_file,
        rows=rows,
        good=sum((note.score or 0) > 0 for note, _ in rows),
        bad=sum((note.score or 0) < 0 for note, _ in rows),
    )


def _noted(run: OpenedRun, id: str) -> tuple[CallRecord, Candidate] | str | None:
    """A candidate with its call, or the id of an episode; None where there is neither."""
    call, dot, _ = id.rpartition(".")
    if not dot:
        return id if run.figures.has_episode(id) else None
    try:
        found = run.figures.call(call)
    except RecordError:
        return None
    return next(((found, one) for one in found.candidates if candidate_id(call, one.index) == id), None)


def _told(of: tuple[CallRecord, Candidate] | str | None) -> dict[str, Any]:
    """What a note is of: its page, a name, and the beginning of the answer."""
    if not isinstance(of, tuple):
        return {"episode": of or "", "call": "", "role": "", "answer": ""}
    call, candidate = of
    answer = first_line(candidate.text or candidate.message)
    return {"episode": "", "call": call.id, "role": call.role, "index": candidate.index, "answer": answer}
