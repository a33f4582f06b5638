"""What a transaction of a writer does: rows of records, the ledger of trained groups, and counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cotune.records.ids import KEY
from cotune.storage.schema import COLUMNS, WIDTHS, Row, in_parts
from cotune.storage.sql.owners import AT, among, join_keys, leave_out_others


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

    def widen(self) -> None:
        """Take more memory from now on, as many rows are to change."""
        ...

    def commit(self) -> None:
        """Make the transaction durable."""
        ...

    def rollback(self) -> None:
        """Undo it; nothing where there is none."""
        ...

    def pause(self) -> list[str]:
        """Between transactions: leave nothing that another process could miss; what people should know of that."""
        ...

    def is_unchanged(self) -> bool:
        """Whether no other writer has changed the records since `pause`."""
        ...

    def close(self) -> list[str]:
        """Close it; what people should know of that."""
        ...


RowKey = tuple[str, ...]
"""The table, the id or target, the name of a reward, and the application: what tells rows of a transaction apart."""


def row_key(table: str, row: Sequence[Any]) -> RowKey:
    """What tells a row apart from others."""
    name = row[1] if table in ("rewards", "feedback") else ""
    return (table, row[0], name, row[AT[table]] if table in AT else "")


class WrittenRows:
    """What became of the rows of a transaction, beside those that were inserted."""

    def __init__(self) -> None:
        self.counted = {"lost": 0, "refused": 0, "foreign": 0}
        """How many could not be stored (`lost`), how many rewards came too late (`refused`), and how many belong to an
        episode of another application (`foreign`)."""
        self.left_out: dict[RowKey, str] = {}
        """Each of these rows, and why: the name of a counter."""

    def leave_out(
        self, reason: str, table: str, coming: Sequence[Sequence[Any]], kept: Sequence[Sequence[Any]]
    ) -> None:
        """Note the rows of `coming` that are not in `kept`."""
        staying = {id(row) for row in kept}
        self.left_out.update((row_key(table, row), reason) for row in coming if id(row) not in staying)


class Transactions:
    """What a writer does in its transactions. `report` logs a cause with its error."""

    def __init__(
        self, database: Database, report: Callable[[str, Exception | None], None], forget: Callable[[], None]
    ) -> None:
        self._db = database
        self.widen = database.widen
        self.forget = forget
        """Forget which messages, images and segments are stored, as some were deleted."""
        self._report = report
        self.any_closed = database.shared or bool(database.execute("SELECT 1 FROM consumed LIMIT 1"))
        """Whether rewards may come too late: with other writers, always."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run one statement."""
        return self._db.execute(sql, parameters)

    def load(self, table: str, rows: Sequence[Row]) -> int:
        """Insert rows of another store, also for targets that take no rewards any more; return how many could not be
        stored."""
        found: list[list[Any]] = [list(row) for row in rows]
        replaced: dict[tuple[Any, ...], list[Any]] = {}
        if table in ("rewards", "feedback"):
            found = self._latest(table, found, replaced)
        broken = self._insert("replaced", [value for row in replaced.values() for value in row])
        self.any_closed = self.any_closed or table == "consumed"
        broken += self._insert(table, [value for row in found for value in row])
        return len(broken)

    def write_rows(self, tables: Mapping[str, list[Any]]) -> WrittenRows:
        """Insert rows, but for those that no store can hold, rewards that come too late, and what belongs to an episode
        of another application."""
        written = WrittenRows()
        rows = {table: _rows(table, tables[table]) for table in ("rewards", "feedback")}
        owned = any(any(tables[table][at :: WIDTHS[table]]) for table, at in AT.items())
        if owned:
            rows |= {table: _rows(table, tables[table]) for table in ("calls", "episodes")}
            coming = {table: [*rows[table]] for table in rows}
            written.counted["foreign"] = leave_out_others(self._db.execute, rows)
            if written.counted["foreign"]:
                for table in rows:
                    written.leave_out("foreign", table, coming[table], rows[table])
        if owned or any(row[0].startswith(KEY) for row in rows["rewards"] + rows["feedback"]):
            rows.setdefault("episodes", _rows("episodes", tables["episodes"]))
            join_keys(self._db.execute, rows)
        replaced: dict[tuple[Any, ...], list[Any]] = {}
        for table in ("rewards", "feedback") if rows["rewards"] or rows["feedback"] else ():
            admitted = self._admit(rows[table]) if self.any_closed else rows[table]
            if len(admitted) < len(rows[table]):
                written.leave_out("refused", table, rows[table], admitted)
                if table == "rewards":
                    written.counted["refused"] += len(rows[table]) - len(admitted)
            rows[table] = self._latest(table, admitted, replaced)
        rows["replaced"] = [*replaced.values()]
        for table, values in {**tables, "replaced": []}.items():
            broken = self._insert(table, [value for row in rows[table] for value in row] if table in rows else values)
            written.leave_out("lost", table, broken, [])
            written.counted["lost"] += len(broken)
        return written

    def _insert(self, table: str, values: Sequence[Any]) -> list[Sequence[Any]]:
        """Insert rows; in halves if one of them is broken, so that one among thousands costs few statements. Return the
        rows that could not be stored."""
        try:
            if values:
                self._db.insert(table, values)
        except self._db.trouble:
            raise
        except self._db.broken as error:
            width = len(COLUMNS[table])
            if len(values) > width:
                half = len(values) // width // 2 * width
                return self._insert(table, values[:half]) + self._insert(table, values[half:])
            self._report("records cannot be stored", error)
            return [values]
        return []

    def _latest(self, table: str, rows: list[list[Any]], replaced: dict[tuple[Any, ...], list[Any]]) -> list[list[Any]]:
        """Rows of rewards, or of their texts, that are the latest of their names. Those that they take the place of, or
        that come too late, are added to `replaced`."""
        at = COLUMNS[table].index("at")
        stored: dict[tuple[str, str], list[Any]] = {}
        found: dict[tuple[str, str], list[Any]] = {}
        sql = f"SELECT {', '.join(COLUMNS[table])} FROM {table}"
        there = among(self._db.execute, sql, "target", [row[0] for row in rows])
        stored.update(((row[0], row[1]), list(row)) for row in there if isinstance(row[at], float | int))
        for row in rows:
            name = (row[0], row[1])
            older, newer = found.get(name) or stored.get(name), row
            if older is not None and newer[at] < older[at]:
                older, newer = newer, older
            if older is not None and older[at] != newer[at]:
                kept = replaced.setdefault((*name, older[at]), [*name, older[at], None, None, older[-1]])
                kept[3 if table == "rewards" else 4] = older[2]
            found[name] = newer
        return [row for name, row in found.items() if row != stored.get(name)]

    def _admit(self, rows: list[list[Any]]) -> list[list[Any]]:
        """Rows of rewards, or of their texts, whose target, and the call it is a candidate of, are still open."""
        names = {name for target, *_ in rows for name in (target, target.rpartition(".")[0])}
        closed = {name for (name,) in among(self._db.execute, "SELECT target FROM consumed", "target", names)}
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

    def set_counters(self, values: Mapping[str, int]) -> None:
        """Set counters of the store."""
        sql = "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        for row in values.items():
            self._db.execute(sql, row)


def _rows(table: str, values: list[Any]) -> list[list[Any]]:
    width = WIDTHS[table]
    return [values[at : at + width] for at in range(0, len(values), width)]
