"""What an application may put where records hold JSON."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

from pydantic import BaseModel

from cotune.json_values import plain
from cotune.records.ids import new_id
from cotune.records.structs import Episode
from cotune.records.tasks import as_tasks
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.opening.resume import tasks_digest


class Sum(BaseModel):
    left: int
    right: int


def test_a_task_of_pydantic_is_recorded_by_its_fields(tmp_path: Path) -> None:
    (task,) = as_tasks([Sum(left=1, right=2)])
    with SqliteStore.open(tmp_path / "records.db") as store:
        store.write([Episode(id=new_id(), task=task, workflow="w")])
        store.flush()
        (episode,) = store.episodes()
    assert episode.task.input == {"left": 1, "right": 2}


def test_lists_of_such_tasks_are_told_apart() -> None:
    first, second, again = (tasks_digest(as_tasks([Sum(left=1, right=right)])) for right in (2, 3, 2))
    assert first == again != second


def test_what_only_seems_to_have_fields_is_its_text() -> None:
    assert plain(MagicMock(name="m")).startswith("<MagicMock")
    assert plain(Sum).startswith("<class")
    assert plain({1, 2}) == "{1, 2}"
