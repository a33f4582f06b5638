"""Runs in a folder that is looked at again."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import httpx
import pytest

from cotune.integrations.web.viewer.server import viewing
from cotune.reading import find_runs
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


def test_a_run_that_goes_while_it_is_looked_for_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "old")
    found = FoundRuns([tmp_path])
    monkeypatch.setattr(find_runs, "_run_folders_below", lambda *_: [tmp_path / "old", tmp_path / "gone"])
    found.look_again()
    assert list(found.opened) == ["old"]
    found.close()


def test_a_run_that_is_deleted_leaves_the_list_and_may_come_back(tmp_path: Path) -> None:
    for name in ("old", "other"):
        record(tmp_path / name)
    with viewing([tmp_path]) as server:
        shutil.rmtree(tmp_path / "old")
        page = httpx.get(f"{server.url}/?all=1")
        assert page.status_code == 200 and "other" in page.text and "/run/old" not in page.text
        record(tmp_path / "old")
        assert "/run/old" in httpx.get(f"{server.url}/?all=1").text


def test_a_run_that_was_replaced_is_opened_again(tmp_path: Path) -> None:
    """The new one has the path of the old, and may have got its inode too."""

    def write(folder: Path, episodes: int) -> None:
        folder.mkdir(exist_ok=True)
        with SqliteStore.open(folder / RECORDS) as store:
            store.write([Episode(id=f"E{n}", task=Task(id="t", input="x"), workflow="w") for n in range(episodes)])

    write(tmp_path / "x", 1)
    found = FoundRuns([tmp_path / "x"])
    before = found.opened["x"]
    assert len(list(before.store.episodes())) == 1 and not before.gone
    shutil.rmtree(tmp_path / "x")
    assert before.gone
    write(tmp_path / "x", 3)
    assert before.gone
    found.look_again()
    assert len(list(found.opened["x"].store.episodes())) == 3 and not found.opened["x"].gone
    write(tmp_path / "y", 2)
    (tmp_path / "y" / RECORDS).rename(tmp_path / "x" / RECORDS)
    assert found.opened["x"].gone
    found.look_again()
    assert not found.opened["x"].gone
    found.close()


def test_pages_show_the_run_that_is_there_now(tmp_path: Path) -> None:
    record(tmp_path / "x")
    with viewing([tmp_path / "x"]) as server, httpx.Client(base_url=server.url) as client:
        assert "/episode/E" in client.get("/run/x/episodes").text
        shutil.rmtree(tmp_path / "x")
        assert client.get("/run/x/episodes").status_code == 404
        (tmp_path / "x").mkdir()
        with SqliteStore.open(tmp_path / "x" / RECORDS) as store:
            store.write([Episode(id="NEW", task=Task(id="t", input="x"), workflow="w")])
        page = client.get("/run/x/episodes").text
        assert "/episode/NEW" in page and "/episode/E" not in page
