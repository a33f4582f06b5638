"""Thumbs and notes of people. They are written on the page of a candidate, and listed on a page."""

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
"""Most bytes of a request."""
_LIMIT_REASON = f"a note has at most {LONGEST:,} characters."


class GivenNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request: a thumb up (1) or down (-1), and a text. A body without both deletes the note."""

    id: str
    score: Annotated[int, msgspec.Meta(ge=-1, le=1)] | None = None
    note: Annotated[str, msgspec.Meta(max_length=LONGEST)] = ""


async def note_part(viewer: Viewer, request: Request) -> Response:
    """Save a note. `access` has checked before that the sender may write."""
    try:
        body = await read_body(request.scope, request.receive, _LARGEST, BodyRoom(_LARGEST), _LIMIT_REASON)
        given_note = decode_body(body, GivenNote)
        # In a thread, because it writes a file.
        stored_note = await asyncio.to_thread(_store_note, viewer.run(request), given_note)
    except RequestError as error:
        return refusal(error)
    except RecordError as error:
        return refusal(RequestError(500, str(error)))
    return json_response(stored_note)


def _store_note(run: OpenedRun, given: GivenNote) -> Note:
    """Store a person's note on an episode or candidate, and return it. If its thumb and text are empty, the note is
    deleted, and an empty one returned.

    Raises RequestError for an unknown target, or if notes cannot be written.
    """
    if _find_target(run, given.id) is None:
        raise RequestError(404, f"{run.name} has no candidate and no episode {given.id[:100]}.")
    if run.notes_file is None:
        raise RequestError(409, "Notes are stored in a folder of records. A database cannot have notes.")
    note = Note(id=given.id, score=given.score or None, note=given.note.strip())
    try:
        return write_note(run.notes_file, note) or Note(id=given.id)
    except OSError as error:
        reason = system_error_message(error, "write the note again")
        raise RequestError(500, reason) from None


def notes_page(viewer: Viewer, request: Request) -> Response:
    """All notes of a run, the newest first, and how to use them."""
    run = viewer.run(request)
    rows = [(note, _describe(_find_target(run, note.id))) for note in reversed(list(run.notes.values()))]
    return viewer.page(
        request,
        "notes.html",
        run,
        file=run.notes_file,
        rows=rows,
        good=sum((note.score or 0) > 0 for note, _ in rows),
        bad=sum((note.score or 0) < 0 for note, _ in rows),
    )


def _find_target(run: OpenedRun, id: str) -> tuple[CallRecord, Candidate] | str | None:
    """The object of a note: for the id of a candidate its call and the candidate, for the id of an episode the id.

    None for an unknown id.
    """
    if "." not in id:  # the id of a candidate is `CALL.INDEX`
        return id if run.figures.has_episode(id) else None
    call_id = id.rpartition(".")[0]
    try:
        call = run.figures.call(call_id)
    except RecordError:
        return None
    for candidate in call.candidates:
        if candidate_id(call_id, candidate.index) == id:
            return call, candidate
    return None


def _describe(target: tuple[CallRecord, Candidate] | str | None) -> dict[str, Any]:
    """Template values of a note's target: its page, its role, and the beginning of its answer."""
    if not isinstance(target, tuple):
        return {"episode": target or "", "call": "", "role": "", "answer": ""}
    call, candidate = target
    answer = first_line(candidate.text or candidate.message)
    return {"episode": "", "call": call.id, "role": call.role, "index": candidate.index, "answer": answer}
