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
        """`report` logs a warning: it takes a text and the exception that caused it. `forget` is called when messages,
        images or segments were deleted: the writer then forgets which ones are stored."""
        self._db = database
        self.widen = database.widen
        self.forget = forget
        self._report = report
        self.may_have_consumed = database.shared or bool(database.execute("SELECT 1 FROM consumed LIMIT 1"))
        """Whether rewards may come too late, because a training step has consumed their group: it is recorded in the
        table `consumed`, or another writer may have recorded it."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run one statement."""
        return self._db.execute(sql, parameters)

    def load(self, table: str, rows: Sequence[Row]) -> int:
        """Insert rows that another store has. Returns the number of rows that could not be stored.

        Rewards are inserted even if their group has been trained on. If a target has several rewards with the same
        name, the table gets the latest, and the table `replaced` gets the others.
        """
        new_rows: list[list[Any]] = [list(row) for row in rows]
        replaced: dict[tuple[Any, ...], list[Any]] = {}
        if table in ("rewards", "feedback"):
            new_rows = self._latest(table, new_rows, replaced)
        broken = self._insert("replaced", _values(replaced.values()))
        self.may_have_consumed = self.may_have_consumed or table == "consumed"
        broken += self._insert(table, _values(new_rows))
        return len(broken)

    def write_rows(self, tables: Mapping[str, list[Any]]) -> WrittenRows:
        """Insert rows, and return which rows were left out: rows that no store can hold, rewards for groups that have
        been trained on, and records for an episode of another application.

        `tables` holds the values of each table's rows, one after another. Only tables that need a decision for each row
        are cut into lists, one for each row; the others are inserted as they are.
        """
        written = WrittenRows()
        rows_of_table = {table: _rows(table, tables[table]) for table in ("rewards", "feedback")}

        # 1. Records that name an application are left out if it does not own the episode.
        names_app = False
        for table, app_column in AT.items():
            app_of_each_row = tables[table][app_column :: WIDTHS[table]]
            names_app = names_app or any(app_of_each_row)
        if names_app:
            rows_of_table["calls"] = _rows("calls", tables["calls"])
            rows_of_table["episodes"] = _rows("episodes", tables["episodes"])
            all_rows = {table: list(rows) for table, rows in rows_of_table.items()}
            written.counted["foreign"] = leave_out_others(self._db.execute, rows_of_table)
            if written.counted["foreign"]:
                for table, rows in rows_of_table.items():
                    written.leave_out("foreign", table, all_rows[table], rows)

        # 2. Rewards for a key of the application are copied to the episodes with this key.
        targets = [row[0] for row in rows_of_table["rewards"] + rows_of_table["feedback"]]
        if names_app or any(target.startswith(KEY) for target in targets):
            rows_of_table.setdefault("episodes", _rows("episodes", tables["episodes"]))
            join_keys(self._db.execute, rows_of_table)

        # 3. Rewards and texts whose group has been trained on are refused. Of the others, the latest of each name is
        #    stored in its table, and the rest in the table `replaced`.
        replaced: dict[tuple[Any, ...], list[Any]] = {}
        for table in ("rewards", "feedback"):
            rows = rows_of_table[table]
            admitted = self._admit(rows) if self.may_have_consumed else rows
            if len(admitted) < len(rows):
                written.leave_out("refused", table, rows, admitted)
                if table == "rewards":  # a text comes with its reward, which is counted
                    written.counted["refused"] += len(rows) - len(admitted)
            rows_of_table[table] = self._latest(table, admitted, replaced)
        rows_of_table["replaced"] = list(replaced.values())

        # 4. Insert the remaining rows.
        for table, all_values in {**tables, "replaced": []}.items():
            values = all_values
            if table in rows_of_table:
                values = _values(rows_of_table[table])
            broken = self._insert(table, values)
            written.leave_out("lost", table, broken, [])
            written.counted["lost"] += len(broken)
        return written

    def _insert(self, table: str, values: Sequence[Any]) -> list[Sequence[Any]]:
        """Insert rows, from their values one after another. Returns the values of each row that could not be stored.

        If a row is broken, the two halves of the rows are inserted separately, so that one broken row among thousands
        costs few statements.
        """
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
        """Of new `rows` of rewards, or of their texts, the rows to store: the latest one for each target and name, if
        it is not stored yet.

        Older rows, stored or new, are added to `replaced`, which has the rows of the table `replaced` by target, name
        and time.
        """
        time_column = COLUMNS[table].index("at")
        stored: dict[tuple[str, str], list[Any]] = {}
        sql = f"SELECT {', '.join(COLUMNS[table])} FROM {table}"
        for stored_row in among(self._db.execute, sql, "target", [row[0] for row in rows]):
            if isinstance(stored_row[time_column], float | int):  # another type is a broken row
                target, name = stored_row[:2]
                stored[target, name] = list(stored_row)

        latest: dict[tuple[str, str], list[Any]] = {}
        for row in rows:
            target, name = row[:2]
            newer = row
            older = latest.get((target, name))
            if older is None:
                older = stored.get((target, name))
            if older is not None and newer[time_column] < older[time_column]:
                newer, older = older, newer
            if older is not None and older[time_column] != newer[time_column]:
                _add_replaced(table, older, older[time_column], replaced)
            latest[target, name] = newer
        return [row for key, row in latest.items() if row != stored.get(key)]

    def _admit(self, rows: list[list[Any]]) -> list[list[Any]]:
        """The rows of rewards, or of their texts, that may still be stored, because their group has not been trained
        on.

        The table `consumed` names the groups that were trained on: each target of a reward, or only the call if the
        target is one of its candidates.
        """
        # The id of a candidate is the call's id, "." and a number.
        possible_names: set[str] = set()
        for row in rows:
            target = row[0]
            call, _, _ = target.rpartition(".")
            possible_names.update((target, call))
        consumed_rows = among(self._db.execute, "SELECT target FROM consumed", "target", possible_names)
        consumed = {name for (name,) in consumed_rows}
        admitted: list[list[Any]] = []
        for row in rows:
            target = row[0]
            call, _, _ = target.rpartition(".")
            if target not in consumed and call not in consumed:
                admitted.append(row)
        return admitted

    def release(self, step: int) -> None:
        """Forget which groups this training step and later ones have consumed."""
        self._db.execute("DELETE FROM consumed WHERE training_step >= ?", [step])

    def consume(self, groups: Sequence[tuple[str, Sequence[str]]], step: int) -> None:
        """Enter the groups that a training step trained on into the table `consumed`, so that later rewards for them
        are refused. Each group is an id with the ids of its members."""
        group_ids: set[str] = set()
        targets: set[str] = set()
        for group, members in groups:
            group_ids.add(group)
            targets.update((group, *members))
        rows = [[target, step, int(target in group_ids)] for target in targets]
        self._db.insert("consumed", _values(rows))
        # Rewards for the episodes of these candidates are refused too. The id of a candidate is the call's id, "." and
        # a number; another target may be a call.
        call_ids: set[str] = set()
        for target in targets:
            call_of_candidate, _, _ = target.rpartition(".")
            call_ids.add(call_of_candidate or target)
        for part in in_parts(call_ids):
            marks = ",".join("?" * len(part))
            episodes = f"SELECT DISTINCT episode, CAST(? AS INTEGER), 0 FROM calls WHERE id IN ({marks})"
            self._db.execute(f"INSERT INTO consumed {episodes} ON CONFLICT (target) DO NOTHING", [step, *part])
        self.may_have_consumed = True

    def count(self, added: Mapping[str, int]) -> None:
        """Add numbers to counters of the store, by the name of the counter."""
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


def _add_replaced(table: str, row: list[Any], at: float, replaced: dict[tuple[Any, ...], list[Any]]) -> None:
    """Add a reward, or its text, to the rows of the table `replaced`. A reward and its text share one row there."""
    target, name, content = row[:3]
    app = row[-1]
    values = {"target": target, "name": name, "at": at, "app": app}
    new_entry = [values.get(column) for column in COLUMNS["replaced"]]
    entry = replaced.setdefault((target, name, at), new_entry)
    content_column = "value" if table == "rewards" else "text"
    entry[COLUMNS["replaced"].index(content_column)] = content


def _rows(table: str, values: list[Any]) -> list[list[Any]]:
    """Rows of a table, from their values one after another."""
    width = WIDTHS[table]
    return [values[start : start + width] for start in range(0, len(values), width)]


def _values(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """The values of rows, one after another."""
    return list(chain.from_iterable(rows))
