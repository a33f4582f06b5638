"""What people say of candidates and episodes: a thumb up or down and a note, in JSON lines beside the records.

A line is `{"id": "<call>.<candidate>", "score": 1.0, "note": "...", "at": ...}`: `cotune records judge
--labels` reads the file as it is, and so does recipe dpo (`records.labels`).
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from cotune.errors import RecordError
from cotune.storage.run_layout import RECORDS
from cotune.storage.whole_file import REWRITING, whole_file

FILE = "notes.jsonl"
"""Name of the file in a folder with records."""
LONGEST = 10_000
"""Characters of a note."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody said of a candidate (`<call>.<index>`) or an episode: `score` is 1 for good, -1 for bad, None for
    neither; `at` is in seconds since the epoch."""

    id: str
    score: float | None = None
    note: str = ""
    at: float = 0.0


def notes_file(records: Path) -> Path:
    """The file of a run folder, or of a records file."""
    if records.is_dir():
        return records / FILE
    return records.with_name(FILE if records.name == RECORDS else f"{records.name}.{FILE}")


def read_notes(file: Path) -> dict[str, Note]:
    """The notes by the id of what they are of, the oldest first. Raises RecordError for a broken line."""
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            note = msgspec.json.decode(line, type=Note)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(f"{file}, line {number} is no note: {error}.", "Mend the line, or remove it.") from None
        found[note.id] = note
    return found


def write_note(file: Path, note: Note) -> Note | None:
    """Keep a note in place of the earlier one of the same id; one that says nothing only removes that. Returns what is
    kept. Raises OSError where the file cannot be written."""
    with REWRITING:
        notes = read_notes(file)
        notes.pop(note.id, None)
        kept = None
        if note.score is not None or note.note:
            kept = notes[note.id] = msgspec.structs.replace(note, at=time.time())
        with whole_file(file) as out:
            out.writelines(msgspec.json.encode(one) + b"\n" for one in notes.values())
        return kept
