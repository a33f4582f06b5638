"""`records.since = "last"` and the other choices of records to learn from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cotune.config.learner import LearnerSettings
from cotune.config.records import RecordsConfig
from cotune.errors import ConfigError, RecordError
from cotune.records.ids import new_id
from cotune.records.structs import CallRecord, Episode, PolicyRef, RewardRecord, Task
from cotune.storage.episode_filters import EVERYTHING, EpisodeFilters
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.sql.upkeep import delete
from cotune.trainer.config.from_records import check_records
from cotune.trainer.records.choice import choose_episodes
from tests.trainer.conftest import Trainer
from tests.trainer.records.records import asked, record, said
from tests.trainer.tiny_app import application, converse


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "records.db") if request.param == "sqlite" else request.getfixturevalue("postgres").database()


class Folder:
    """The part of a run folder that is asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.described: dict[str, Any] = {}
        path.mkdir(parents=True)

    def describe_as(self, described: dict[str, Any]) -> None:
        self.described = described


def end(store: Store, **fields: Any) -> str:
    id = new_id()
    started = fields.pop("started", time.time())
    policy = PolicyRef("p", fields.pop("version", 0))
    app = fields.get("app", "")
    call = CallRecord(id=new_id(), episode=id, role="r", step=0, turn=0, policy=policy, started=started, app=app)
    store.write([call, Episode(id=id, task=Task(id="t", input=1), workflow="w", started=started, **fields)])
    store.flush()
    return id


def chosen(folder: Folder, store: Store, **settings: Any) -> list[str]:
    found, _ = choose_episodes(folder, RecordsConfig(path="x", **settings), store)  # type: ignore[arg-type]
    return [episode.id for episode in found.episodes()]


def test_what_is_new_after_a_deletion(address: str, tmp_path: Path) -> None:
    with open_store(address) as store:
        kept, gone = end(store), [end(store) for _ in range(3)]
        store.write([RewardRecord(gone[-1], "team", 1.0)])
        first = Folder(tmp_path / "runs/first")
        chosen(first, store, since="last")
        delete(store, gone)
        assert store.figures().episode_count(EVERYTHING) == 1
    with open_store(address) as store:
        new = [end(store) for _ in range(2)]
        store.write([RewardRecord(kept, "team", 1.0)])
        store.flush()
        filters = EpisodeFilters(new=(first.described["held"]["until"], store.figures().marks()))
        assert [episode.id for episode in store.episodes(filters)] == [kept, *new]
        delete(store, [kept, *new])
        last = [end(store), end(store)]
        assert [episode.id for episode in store.episodes(filters)] == []
        filters = EpisodeFilters(new=(filters.new[1] if filters.new else (0, 0), store.figures().marks()))
        assert [episode.id for episode in store.episodes(filters)] == last
        assert set(store.counters().values()) == {0}


def test_by_app_and_time(address: str, tmp_path: Path) -> None:
    with open_store(address) as store:
        desk = end(store, app="desk")
        shop = end(store, app="shop", version=3)
        old = end(store, app="desk", started=time.time() - 9 * 86400)
        every = [desk, shop, old]
        assert chosen(Folder(tmp_path / "1"), store) == every
        assert chosen(Folder(tmp_path / "2"), store, app="desk") == [desk, old]
        assert chosen(Folder(tmp_path / "4"), store, since="7d") == [desk, shop]
        assert chosen(Folder(tmp_path / "5"), store, since="2020-01-31", app="shop") == [shop]
    with pytest.raises(ConfigError, match=r"yesterday.*is not a time"):
        check_records("sft", RecordsConfig(path="x", since="yesterday"), LearnerSettings())


def test_a_run_that_is_resumed_sees_what_it_began_with(address: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    with open_store(address) as store:
        first = end(store)
        assert chosen(folder, store, since="last") == [first]
        folder.described = msgspec.json.decode(msgspec.json.encode(folder.described))
        end(store)
        assert chosen(folder, store, since="last") == [first]


def learn_from(name: str, path: str) -> str:
    """A run in `runs` that learns what is new in the records at a path, and finishes; what it says of them."""
    folder = Folder(Path("runs").absolute() / name)
    with open_store(path, read_only=True) as store:
        _, said = choose_episodes(folder, RecordsConfig(path=path, since="last"), store)  # type: ignore[arg-type]
    config = {"recipe": "sft", "steps": 1, "records": {"path": path}}
    (folder.path / "run.json").write_bytes(msgspec.json.encode({**folder.described, "config": config}))
    (folder.path / "end.json").write_text('{"kind": "ended", "cause": "its last step"}')
    return said


@pytest.mark.parametrize("again", ["day/records.db", "day/", "./day", "link", "link/records.db", "elsewhere/../day"])
def test_another_address_of_the_same_records_is_no_other_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    with open_store(tmp_path / "day" / "records.db") as store:
        end(store)
    Path("link").symlink_to("day")
    assert "as no run came before" in learn_from("n1", str(tmp_path / "day"))
    assert "all episodes since n1" in learn_from("n2", again)
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("runs").symlink_to("../runs")
    assert "all episodes since n2" in learn_from("n3", f"../{again}")


def test_the_same_relative_path_elsewhere_is_another_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("a", "b"):
        with open_store(tmp_path / place / "day" / "records.db") as store:
            end(store)
        (tmp_path / place / "runs").symlink_to("../runs")
    monkeypatch.chdir(tmp_path / "a")
    (tmp_path / "runs").mkdir()
    assert "as no run came before" in learn_from("n1", "day")
    monkeypatch.chdir(tmp_path / "b")
    assert "as no run came before" in learn_from("n2", "day")
    assert "all episodes since n2" in learn_from("n3", "day")
    monkeypatch.chdir(tmp_path / "a")
    assert "all episodes since n1" in learn_from("n4", "day")


def test_each_night_learns_what_is_new(address: str, trainer: Trainer) -> None:
    """Also an episode of an earlier night that gets its reward later; a run that failed is made up for."""

    def night(name: str, **settings: Any) -> Any:
        records = {"path": address, "since": "last", "min_reward": 0.5}
        app = application(converse)
        return trainer(app, None, to=name, recipe="sft", records=records, steps=1, tasks_per_step=1, **settings)

    def traced(letter: str, reward: float | None) -> str:
        with open_store(address) as store:
            before = {episode.id for episode in store.episodes()}
            rewards = {} if reward is None else {"team": reward}
            turns = [(role, asked(f"say {letter}"), said(4 * letter)) for role in ("first", "second")]
            record(store, letter, turns, rewards=rewards)  # type: ignore[arg-type]
            store.flush()
            (new,) = {episode.id for episode in store.episodes()} - before
        return new

    traced("a", 1.0)
    waits = traced("b", None)
    night("n1")
    assert "everything, as no run came before" in trainer.said and "rows from 1 episode:" in trainer.said
    with pytest.raises(RecordError, match="No recorded answer"):
        night("n2")
    with open_store(address) as store:
        store.commit([RewardRecord(waits, "team", 1.0, time.time())])
    traced("c", 1.0)
    night("n3")
    assert "all episodes since n1" in trainer.said and "rows from 2 episodes:" in trainer.said
    traced("d", 1.0)
    night("n4")
    assert "all episodes since n3" in trainer.said and "rows from 1 episode:" in trainer.said
