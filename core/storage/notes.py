"""Notes of people on candidates and episodes: a thumb up or down and a text, in JSON lines next to the records.

A line is `{"id": "<call>.<candidate>", "score": 1.0, "note": "...", "at": ...}`. `cotune records judge --labels` and
recipe dpo (`records.labels`) read the file as it is.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from cotune.errors import RecordError
from cotune.storage.run_layout import RECORDS
from cotune.storage.whole_file import rewriting, whole_file

FILE = "notes.jsonl"
"""Name of the file in a folder with records."""
LONGEST = 10_000
"""Maximum number of characters of a note."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A person's opinion of a candidate (`<call>.<index>`) or an episode. `score` is 1 for good, -1 for bad, None for
    neither; `at` is in seconds since the epoch."""

    id: str
    score: float | None = None
    note: str = ""
    at: float = 0.0


def notes_file(records: Path) -> Path:
    """The file of notes for the records of a run folder, or for a records file."""
    if records.is_dir():
        return records / FILE
    if records.name == RECORDS:  # the records file of a run
        return records.with_name(FILE)
    return records.with_name(f"{records.name}.{FILE}")


def read_notes(file: Path) -> dict[str, Note]:
    """The notes by the id of their candidate or episode, the oldest first. Raises RecordError for a broken line."""
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    notes: dict[str, Note] = {}
    for number, line in enumerate(lines, 1):
        try:
            note = msgspec.json.decode(line, type=Note)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            cause = f"{file}, line {number} is not a note: {error}."
            raise RecordError(cause, "Fix the line, or remove it.") from None
        notes[note.id] = note
    return notes


def write_note(file: Path, note: Note) -> Note | None:
    """Write a note in place of the earlier note with the same id. A note without score and text only removes the
    earlier one. Returns the note that was written. Raises OSError if the file cannot be written."""
    with rewriting(file):
        notes = read_notes(file)
        notes.pop(note.id, None)  # the new note is the last one in the file
        new_note = None
        if note.score is not None or note.note:
            new_note = msgspec.structs.replace(note, at=time.time())
            notes[note.id] = new_note
        with whole_file(file) as out:
            for line in map(msgspec.json.encode, notes.values()):
                out.write(line + b"\n")
        return new_note
