"""The embedded store: one SQLite file in WAL mode. One process writes, any number of threads and processes read."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from cotune.errors import RunError
from cotune.storage.damage import is_file_error, is_value_error, replace_broken_texts, unusable
from cotune.storage.file_lock import FileLock
from cotune.storage.run_layout import RECORDS
from cotune.storage.schema import Row
from cotune.storage.sql.sqlite import SqliteDatabase, check, connect_empty, connect_reader
from cotune.storage.sql.store import SqlStore
from cotune.storage.sql.writer import Writer


class SqliteStore(SqlStore[sqlite3.Connection]):
    """A `Store`, which documents its methods, in one file."""

    def __init__(
        self, path: Path, writer: Writer | None, lock: FileLock | None, connect: Callable[[], sqlite3.Connection]
    ) -> None:
        """Use `SqliteStore.open`."""
        self.path = path
        super().__init__(str(path), connect, writer, lock)

    @classmethod
    def open(cls, path: Path | str, read_only: bool = False) -> Self:
        """Open the records file `path`, or `records.db` in the folder `path`. A missing file is created, unless it is
        opened for reading only.

        Raises RunError if another process writes it, if it is missing and `read_only`, or if it is not a records file
        of this version.
        """
        path = Path(path).absolute()
        if path.is_dir():
            path = path / RECORDS
        if read_only:
            if not path.is_file():
                raise RunError(f"There is no records file at {path}.", "Name a run folder or its records file.")
            store = cls(path, writer=None, lock=None, connect=lambda: connect_reader(path))
            with store._reader() as db:
                check(db, path)
            return store
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            cause = f"The folder {path.parent} cannot be created: {error.strerror}."
            raise RunError(cause, "Check the path and its permissions.") from None
        lock = FileLock(path.with_name(path.name + ".lock"), f"The records file {path}")
        try:
            path.touch()  # gives the file the usual permissions; SQLite would leave out the group
            return cls(path, Writer(SqliteDatabase(path)), lock, connect=lambda: connect_reader(path))
        except OSError as error:
            lock.release()
            cause = f"The records file {path} cannot be written: {error.strerror}."
            raise RunError(cause, "Check its permissions.") from None
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the writer reads a table at its start
            lock.release()
            raise unusable(path, error) from error
        except BaseException:
            lock.release()
            raise

    @classmethod
    def empty(cls, folder: Path) -> Self:
        """A store without records, in memory."""
        return cls(folder / RECORDS, writer=None, lock=None, connect=connect_empty)

    @property
    def folder(self) -> Path:
        return self.path.parent

    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Rows of any SELECT, on a separate connection that cannot write. Tables: docs/reference/records.md."""
        with self._reader() as db:
            try:
                return db.execute(sql, parameters).fetchall()
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if is_file_error(error):
                    raise unusable(self.path, error) from error
                if not is_value_error(error):  # the query itself is wrong
                    raise
        # A value in the file is not valid text. Read again, with replacement characters in place of the broken ones.
        try:
            with contextlib.closing(replace_broken_texts(connect_reader(self.path))) as db:
                return db.execute(sql, parameters).fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise unusable(self.path, error) from error
