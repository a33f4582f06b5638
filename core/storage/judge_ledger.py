"""Answers of judges and their cost so far: one SQLite file in the run folder, shared by all processes of a run."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

FILE = "judge.db"
"""Name of the file in a run folder."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, judge TEXT, text TEXT);
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY, judge TEXT, prompt_tokens INTEGER, completion_tokens INTEGER, cost REAL);
CREATE TABLE IF NOT EXISTS counts (judge TEXT, name TEXT, count INTEGER, PRIMARY KEY (judge, name));
"""


class Ledger:
    """Answers by content, requests with their cost, and counts, by judge. Safe from any thread and process.

    A request is entered before it is sent, with the highest cost that it can have, so that spending never passes a
    cap. If the process is killed meanwhile, the entry keeps this cost.
    """

    def __init__(self, folder: Path | None) -> None:
        """Keep the ledger in `folder`, or in memory if it is None."""
        self.path = None if folder is None else folder / FILE
        self._lock = threading.Lock()
        self._memory = None if folder else _open_database(":memory:")

    def answer(self, key: str) -> str | None:
        """The stored answer to a question; None without one. `key` is the content address of the question."""
        with self._open() as db:
            row = db.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: str, judge: str, text: str) -> None:
        """Keep the answer to a question."""
        with self._open() as db:
            db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (key, judge, text))

    def reserve(
        self, judge: str, highest_cost: float, *, max_calls: int | None, max_cost: float | None
    ) -> int | Literal["max_calls", "max_cost"]:
        """Enter a request that a judge is about to send, with the highest cost that it can have. Returns its number.

        If the request would pass a cap of the judge, nothing is entered, and the name of the cap is returned.
        """
        with self._open() as db, db:  # the second `db` commits at the end, or rolls back
            db.execute("BEGIN IMMEDIATE")
            calls, cost = db.execute(
                "SELECT count(*), coalesce(sum(cost), 0) FROM requests WHERE judge = ?", (judge,)
            ).fetchone()
            if max_calls is not None and calls >= max_calls:
                return "max_calls"
            if max_cost is not None and cost + highest_cost > max_cost:
                return "max_cost"
            cursor = db.execute("INSERT INTO requests VALUES (NULL, ?, NULL, NULL, ?)", (judge, highest_cost))
            return int(cursor.lastrowid or 0)

    def settle(self, request: int, prompt_tokens: int, completion_tokens: int, cost: float) -> None:
        """Enter the tokens and the real cost of a request that was answered."""
        with self._open() as db:
            db.execute(
                "UPDATE requests SET prompt_tokens = ?, completion_tokens = ?, cost = ? WHERE id = ?",
                (prompt_tokens, completion_tokens, cost, request),
            )

    def count(self, judge: str, name: str) -> None:
        """Add one to a named count of a judge."""
        with self._open() as db:
            db.execute(
                "INSERT INTO counts VALUES (?, ?, 1) ON CONFLICT (judge, name) DO UPDATE SET count = count + 1",
                (judge, name),
            )

    def totals(self, judge: str | None = None) -> Mapping[str, float]:
        """Totals of one judge, or of all: `requests`, `prompt_tokens`, `completion_tokens`, `cost`, and the counts by
        name."""
        summed = ("prompt_tokens", "completion_tokens", "cost")
        sums = ", ".join(f"coalesce(sum({name}), 0)" for name in summed)
        of_judge = "WHERE ? IS NULL OR judge = ?"
        parameters = (judge, judge)
        with self._open() as db:
            row = db.execute(f"SELECT count(*), {sums} FROM requests {of_judge}", parameters).fetchone()
            counts = db.execute(f"SELECT name, sum(count) FROM counts {of_judge} GROUP BY name", parameters).fetchall()
        totals: dict[str, float] = dict(zip(("requests", *summed), row, strict=True))
        totals.update(counts)
        return totals

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection to the ledger, under the lock. A file is opened each time, because the folder of a run that ends
        before its first step is removed, and the file with it."""
        with self._lock:
            if self._memory is not None:
                yield self._memory
                return
            with closing(_open_database(str(self.path))) as db:
                yield db


def totals_of(folder: Path) -> Mapping[str, float]:
    """Totals of all judges of a run; empty if the run asked no judge."""
    return Ledger(folder).totals() if (folder / FILE).is_file() else {}


def _open_database(path: str) -> sqlite3.Connection:
    # No WAL: two processes may open a new file at once, and SQLite does not wait for locks while it changes to WAL.
    db = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA synchronous = NORMAL")
    db.executescript(_SCHEMA)
    return db
