"""The operations in a transaction of a writer: rows of records, the ledger of trained groups, and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
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
    """Exceptions whose cause is the disk, the server or the network: the writer waits and tries again."""
    broken: tuple[type[Exception], ...]
    """Exceptions for a row that no store can hold, unless they are `trouble`."""

    def begin(self) -> None:
        """Begin a transaction; until its end no other writer has one."""
        ...

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run one statement."""
        ...

    def insert(self, table: str, values: Sequence[Any]) -> None:
        """Insert rows, their values one after another. `CONFLICTS` decides about rows that exist already. If this
        raises `broken`, no row is inserted, and the transaction continues."""
        ...

    def widen(self) -> None:
        """Use more memory from now on, because many rows will change."""
        ...

    def commit(self) -> None:
        """Make the transaction durable."""
        ...

    def rollback(self) -> None:
        """Undo the transaction. Does nothing without one."""
        ...

    def pause(self) -> list[str]:
        """Between transactions: make sure that another process sees everything. Returns warnings for people."""
        ...

    def is_unchanged(self) -> bool:
        """Whether no other writer has changed the records since `pause`."""
        ...

    def close(self) -> list[str]:
        """Close the connection. Returns warnings for people."""
        ...


RowKey = tuple[str, ...]
"""The identity of a row in a transaction: its table, its id or target, the name of a reward, and the application."""


def row_key(table: str, row: Sequence[Any]) -> RowKey:
    """The identity of a row in a transaction."""
    name = row[1] if table in ("rewards", "feedback") else ""
    return (table, row[0], name, row[AT[table]] if table in AT else "")


class WrittenRows:
    """The rows of a transaction that were not inserted, and their numbers."""

    def __init__(self) -> None:
        self.counted = {"lost": 0, "refused": 0, "foreign": 0}
        """Rows that could not be stored (`lost`), rewards that came too late (`refused`), and rows for an episode of
        another application (`foreign`)."""
        self.left_out: dict[RowKey, str] = {}
        """Each of these rows, with the name of its counter."""

    def leave_out(
        self, reason: str, table: str, rows: Sequence[Sequence[Any]], accepted: Sequence[Sequence[Any]]
    ) -> None:
        """Note the rows that are not among the `accepted` ones."""
        accepted_ids = {id(row) for row in accepted}
        self.left_out.update((row_key(table, row), reason) for row in rows if id(row) not in accepted_ids)


class Transactions:
    """The operations of a writer in its transactions. `report` logs a cause with its error."""

    def __init__(
        self, database: Database, report: Callable[[str, Exception | None], None], forget: Callable[[], None]
    ) -> None:
        """`report` is called with a text and its cause, for warnings. `forget` is called when messages, images or
        segments were deleted: the store then forgets which ones it has written."""
        self._db = database
        self.widen = database.widen
        self.forget = forget
        self._report = report
        self.any_closed = database.shared or bool(database.execute("SELECT 1 FROM consumed LIMIT 1"))
        """Whether rewards may come too late: a group was consumed, or another writer may have consumed one."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run one statement."""
        return self._db.execute(sql, parameters)

    def load(self, table: str, rows: Sequence[Row]) -> int:
        """Insert rows of another store. Rewards are inserted even if their group has been consumed. Returns the number
        of rows that could not be stored."""
        new_rows: list[list[Any]] = [list(row) for row in rows]
        replaced: dict[tuple[Any, ...], list[Any]] = {}
        if table in ("rewards", "feedback"):
            new_rows = self._latest(table, new_rows, replaced)
        broken = self._insert("replaced", _values(replaced.values()))
        self.any_closed = self.any_closed or table == "consumed"
        broken += self._insert(table, _values(new_rows))
        return len(broken)

    def write_rows(self, tables: Mapping[str, list[Any]]) -> WrittenRows:
        """Insert rows. Left out are rows that no store can hold, rewards that come too late, and records for an episode
        of another application.

        `tables` holds the values of each table's rows, one after another. Most transactions insert them as they are;
        only tables that need a decision per row are cut into rows.
        """
        written = WrittenRows()
        rows = {table: _rows(table, tables[table]) for table in ("rewards", "feedback")}

        # 1. Records that name their application: is it the owner of the episode?
        any_app = any(any(tables[table][column :: WIDTHS[table]]) for table, column in AT.items())
        if any_app:
            rows |= {table: _rows(table, tables[table]) for table in ("calls", "episodes")}
            all_rows = {table: [*rows[table]] for table in rows}
            written.counted["foreign"] = leave_out_others(self._db.execute, rows)
            if written.counted["foreign"]:
                for table in rows:
                    written.leave_out("foreign", table, all_rows[table], rows[table])

        # 2. Rewards for a key of the application are copied to the episodes with this key.
        if any_app or any(row[0].startswith(KEY) for row in rows["rewards"] + rows["feedback"]):
            rows.setdefault("episodes", _rows("episodes", tables["episodes"]))
            join_keys(self._db.execute, rows)

        # 3. Rewards whose group has been consumed are refused. Of the others, the latest of each name is stored.
        replaced: dict[tuple[Any, ...], list[Any]] = {}
        if rows["rewards"] or rows["feedback"]:
            for table in ("rewards", "feedback"):
                admitted = self._admit(rows[table]) if self.any_closed else rows[table]
                if len(admitted) < len(rows[table]):
                    written.leave_out("refused", table, rows[table], admitted)
                    if table == "rewards":
                        written.counted["refused"] += len(rows[table]) - len(admitted)
                rows[table] = self._latest(table, admitted, replaced)
        rows["replaced"] = [*replaced.values()]

        # 4. Everything else is inserted as it is.
        for table, values in {**tables, "replaced": []}.items():
            broken = self._insert(table, _values(rows[table]) if table in rows else values)
            written.leave_out("lost", table, broken, [])
            written.counted["lost"] += len(broken)
        return written

    def _insert(self, table: str, values: Sequence[Any]) -> list[Sequence[Any]]:
        """Insert rows and return the rows that could not be stored. If a row is broken, the two halves are inserted
        separately, so that one broken row among thousands costs few statements."""
        try:
            if values:
                self._db.insert(table, values)
        except self._db.trouble:
            raise
        except self._db.broken as error:
            width = len(COLUMNS[table])
            n_rows = len(values) // width
            if n_rows > 1:
                half = n_rows // 2 * width
                return self._insert(table, values[:half]) + self._insert(table, values[half:])
            self._report("records cannot be stored", error)
            return [values]
        return []

    def _latest(self, table: str, rows: list[list[Any]], replaced: dict[tuple[Any, ...], list[Any]]) -> list[list[Any]]:
        """The latest row of each target and name, from rows of rewards or of their texts. Older rows, stored or new,
        are added to `replaced`."""
        time = COLUMNS[table].index("at")
        stored: dict[tuple[str, str], list[Any]] = {}
        latest: dict[tuple[str, str], list[Any]] = {}
        sql = f"SELECT {', '.join(COLUMNS[table])} FROM {table}"
        for row in among(self._db.execute, sql, "target", [row[0] for row in rows]):
            if isinstance(row[time], float | int):  # another type is a broken row
                stored[row[0], row[1]] = list(row)
        for new in rows:
            name = (new[0], new[1])
            older = latest.get(name) or stored.get(name)
            newer = new
            if older is not None and newer[time] < older[time]:
                older, newer = newer, older
            if older is not None and older[time] != newer[time]:
                # A reward and its text are replaced together: they share a row of `replaced`.
                entry = replaced.setdefault((*name, older[time]), [*name, older[time], None, None, older[-1]])
                entry[3 if table == "rewards" else 4] = older[2]
            latest[name] = newer
        return [row for name, row in latest.items() if row != stored.get(name)]

    def _admit(self, rows: list[list[Any]]) -> list[list[Any]]:
        """The rows of rewards, or of their texts, that may still be stored: their group has not been trained on.

        The table `consumed` names what was trained on: the target itself, or the call if the target is one of its
        candidates.
        """
        names_of_rows: list[set[str]] = []
        for row in rows:
            target = row[0]
            call, _, _ = target.rpartition(".")
            names_of_rows.append({target, call})
        names = set().union(*names_of_rows)
        closed = {name for (name,) in among(self._db.execute, "SELECT target FROM consumed", "target", names)}
        return [row for row, own_names in zip(rows, names_of_rows, strict=True) if closed.isdisjoint(own_names)]

    def release(self, step: int) -> None:
        """Forget which groups this training step and later ones have consumed."""
        self._db.execute("DELETE FROM consumed WHERE training_step >= ?", [step])

    def consume(self, groups: Sequence[tuple[str, Sequence[str]]], step: int) -> None:
        """Enter groups, with their members, that a training step consumed."""
        names = {group for group, _ in groups}
        targets = set(names)
        for _, members in groups:
            targets.update(members)
        self._db.insert("consumed", _values([name, step, int(name in names)] for name in targets))
        # Rewards for the episodes of these candidates are refused too.
        for part in in_parts({name.rpartition(".")[0] or name for name in targets}):
            marks = ",".join("?" * len(part))
            episodes = f"SELECT DISTINCT episode, CAST(? AS INTEGER), 0 FROM calls WHERE id IN ({marks})"
            self._db.execute(f"INSERT INTO consumed {episodes} ON CONFLICT (target) DO NOTHING", [step, *part])
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
    """Rows of a table, from their values one after another."""
    width = WIDTHS[table]
    return [values[start : start + width] for start in range(0, len(values), width)]


def _values(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """The values of rows, one after another."""
    return list(chain.from_iterable(rows))
