"""Runs in a folder that is looked at again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cotune.reading.find_runs import FoundRuns
from cotune.records.structs import Episode, Task
from cotune.storage.run_layout import RECORDS
from cotune.storage.sqlite_store import SqliteStore


def record(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with SqliteStore.open(folder / RECORDS) as store:
        store.write([Episode(id="E", task=Task(id="t", input="x"), workflow="w")])


def test_a_run_that_could_not_be_read_yet_is_found_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record(tmp_path / "old")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / RECORDS).write_text("not a database yet, " * 100)
    caplog.set_level(logging.WARNING)
    found = FoundRuns([tmp_path])
    found.look_again()
    assert list(found.opened) == ["old"] and caplog.text.count("begun is left out") == 1
    (begun / RECORDS).unlink()
    record(begun)
    found.look_again()
    assert sorted(found.opened) == ["begun", "old"]
    found.close()
