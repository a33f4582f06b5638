"""The error for a records file that SQLite cannot read: the file, the rows that can be read, and how to save them."""

from __future__ import annotations

import shlex
import sqlite3
from pathlib import Path

from cotune.errors import RunError
from cotune.storage.schema import WIDTHS

_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_OUT_OF_REACH = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM}


def is_file_error(error: sqlite3.Error | UnicodeDecodeError) -> bool:
    """Whether the file is the cause of an error, and not the query."""
    return isinstance(error, UnicodeDecodeError) or _error_code(error) in _DAMAGED | _OUT_OF_REACH


def is_value_error(error: sqlite3.Error | UnicodeDecodeError) -> bool:
    """Whether the cause is a value that is not text: then a row is broken, not the file."""
    return "Could not decode to UTF-8" in str(error)


def replace_broken_texts(db: sqlite3.Connection) -> sqlite3.Connection:
    """`db`, set to read broken texts with replacement characters."""
    db.text_factory = lambda text: text.decode("utf-8", "replace")
    return db


def _error_code(error: sqlite3.Error | UnicodeDecodeError) -> int:
    """The primary code of an error of SQLite, the last byte of its extended code; 0 for another error."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def unusable(path: Path, error: sqlite3.Error | UnicodeDecodeError) -> RunError:
    """The error for a records file for which SQLite raised `error`. For a damaged file it says which rows can be read,
    and how to save them."""
    if not _is_damage(path, error):
        return RunError(
            f"The records file {path} cannot be used: {error}.", "Check the path, its permissions and the disk."
        )
    recovered = path.with_name(f"recovered-{path.name}")
    return RunError(
        f"The records file {path} is damaged ({error}); {_readable_rows_text(path)}.",
        f"Save what can be saved with SQLite's own tool: "
        f"sqlite3 {shlex.quote(str(path))} .recover | sqlite3 {shlex.quote(str(recovered))}, and name the new file.",
    )


def _is_damage(path: Path, error: sqlite3.Error | UnicodeDecodeError) -> bool:
    """Whether the file was a database before. Otherwise it is another kind of file."""
    if _error_code(error) == sqlite3.SQLITE_NOTADB:
        with path.open("rb") as file:
            header = file.read(16)
            return header in (b"SQLite format 3\0", bytes(16))
    return isinstance(error, UnicodeDecodeError) or _error_code(error) in _DAMAGED


def _readable_rows_text(path: Path) -> str:
    """A phrase with the number of rows in each table that can be read before the first damaged row."""
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            rows_of_table = {table: _count_readable_rows(db, table) for table in WIDTHS}
        finally:
            db.close()
    except sqlite3.Error:
        rows_of_table = {}
    if not any(rows_of_table.values()):
        return "nothing in it can be read as it is"
    return "before the damage it has " + ", ".join(f"{count} {table}" for table, count in rows_of_table.items())


def _count_readable_rows(db: sqlite3.Connection, table: str) -> int:
    """The number of rows that can be read before the first damaged one."""
    count = 0
    try:
        for _ in db.execute(f"SELECT * FROM {table}"):
            count += 1
    except (sqlite3.Error, UnicodeDecodeError):
        pass  # the first damaged row: the rows before it are counted
    return count
