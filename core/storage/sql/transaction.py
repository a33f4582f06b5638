"""What a transaction of a writer does: rows of records, the ledger of trained groups, and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from cotune.storage.schema import COLUMNS, WIDTHS, Row, in_parts


class Database(Protocol):
    """The connection of a writer. Statements are in SQLite's dialect."""

    name: str
    """For people."""
    shared: bool
    """Whether other processes may write too."""
    trouble: tuple[type[Exception], ...]
    """Raised where the disk, the server or the way there is the cause: waited out."""
    broken: tuple[type[Exception], ...]
    """Raised for a row that no store can hold, unless it is `trouble`."""

    def begin(self) -> None:
        """Begin a transaction; until its end no other writer has one."""
        ...

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run one statement."""
        ...

    def insert(self, table: str, values: Sequence[Any]) -> None:
        """Insert rows, their values one after another; `CONFLICTS` says what happens to those that are there. If it
        raises `broken`, none is inserted, and the transaction goes on."""
        ...

    def commit(self) -> None:
        """Make the transaction durable."""
        ...

    def rollback(self) -> None:
        """Undo it; nothing where there is none."""
        ...

    def close(self) -> list[str]:
        """Close it; what people should know of that."""
        ...


class Transactions:
    """What a writer does in its transactions. `report` logs a cause with its error."""

    def __init__(self, database: Database, report: Callable[[str, Exception | None], None]) -> None:
        self._db = database
        self._report = report
        self.any_closed = database.shared or bool(database.execute("SELECT 1 FROM consumed LIMIT 1"))
        """Whether rewards may come too late: with other writers, always."""

    def write_rows(self, tables: Mapping[str, list[Any]]) -> tuple[int, int]:
        """Insert rows; return how many could not be stored, and how many rewards were refused."""
        lost = refused = 0
        replaced: dict[tuple[Any, ...], list[Any]] = {}
        for table, values in tables.items():
            if table in ("rewards", "feedback") and values:
                rows = [values[at : at + WIDTHS[table]] for at in range(0, len(values), WIDTHS[table])]
                admitted = self._admit(rows) if self.any_closed else rows
                if table == "rewards":
                    refused = len(rows) - len(admitted)
                values = [value for row in self._latest(table, admitted, replaced) for value in row]
            lost += self._insert(table, values)
        lost += self._insert("replaced", [value for row in replaced.values() for value in row])
        return lost, refused

    def _insert(self, table: str, values: Sequence[Any]) -> int:
        """Insert rows; row by row if one of them is broken. Return how many could not be stored."""
        try:
            if values:
                self._db.insert(table, values)
        except self._db.trouble:
            raise
        except self._db.broken as error:
            width = len(COLUMNS[table])
            if len(values) > width:
                return sum(self._insert(table, values[at : at + width]) for at in range(0, len(values), width))
            self._report("records cannot be stored", error)
            return 1
        return 0

    def _latest(
        self, table: str, rows: Iterable[list[Any]], replaced: dict[tuple[Any, ...], list[Any]]
    ) -> Iterable[list[Any]]:
        """Rows of rewards, or of their texts, that are the latest of their names. Those that they take the place of, or
        that come too late, are added to `replaced`."""
        at = COLUMNS[table].index("at")
        stored: dict[tuple[str, str], list[Any]] = {}
        found: dict[tuple[str, str], list[Any]] = {}
        columns = ", ".join(COLUMNS[table])
        rows = list(rows)
        for some in in_parts({row[0] for row in rows}):
            sql = f"SELECT {columns} FROM {table} WHERE target IN ({','.join('?' * len(some))})"
            there = (list(row) for row in self._db.execute(sql, some) if isinstance(row[at], float | int))
            stored.update(((row[0], row[1]), row) for row in there)
        for row in rows:
            name = (row[0], row[1])
            older, newer = found.get(name) or stored.get(name), row
            if older is not None and newer[at] < older[at]:
                older, newer = newer, older
            if older is not None and older[at] != newer[at]:
                value, text = (older[2], None) if table == "rewards" else (None, older[2])
                replaced[(*name, older[at], table)] = [*name, older[at], value, text]
            found[name] = newer
        return [row for name, row in found.items() if row != stored.get(name)]

    def _admit(self, rows: list[list[Any]]) -> list[list[Any]]:
        """Rows of rewards, or of their texts, whose target, and the call it is a candidate of, are still open."""
        names = {name for target, *_ in rows for name in (target, target.rpartition(".")[0])}
        closed = {
            name
            for some in in_parts(names)
            for (name,) in self._db.execute(
                f"SELECT target FROM consumed WHERE target IN ({','.join('?' * len(some))})", some
            )
        }
        return [row for row in rows if row[0] not in closed and row[0].rpartition(".")[0] not in closed]

    def release(self, step: int) -> None:
        """Forget what this training step and later ones have consumed."""
        self._db.execute("DELETE FROM consumed WHERE training_step >= ?", [step])

    def consume(self, groups: Sequence[tuple[str, Sequence[str]]], step: int) -> None:
        """Enter groups, with their members, that a training step consumed."""
        targets = {name for group, members in groups for name in (group, *members)}
        names = {group for group, _ in groups}
        self._db.insert("consumed", [value for name in targets for value in (name, step, int(name in names))])
        for some in in_parts({name.rpartition(".")[0] or name for name in targets}):  # rewards name episodes too
            marks = ",".join("?" * len(some))
            episodes = f"SELECT DISTINCT episode, CAST(? AS INTEGER), 0 FROM calls WHERE id IN ({marks})"
            self._db.execute(f"INSERT INTO consumed {episodes} ON CONFLICT (target) DO NOTHING", [step, *some])
        self.any_closed = True

    def count(self, added: Mapping[str, int]) -> None:
        """Add to the counters of the store."""
        for name, value in added.items():
            self._db.execute(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE "
                "SET value = counters.value + excluded.value",
                (name, value),
            )
