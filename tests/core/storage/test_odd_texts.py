"""SQL, marks of formats and odd characters in every text of a record: stored, read, searched and deleted as texts."""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotune.records.ids import key_target, new_id
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    FeedbackRecord,
    Message,
    PolicyRef,
    RewardRecord,
    Task,
)
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.sql.upkeep import delete
from cotune.storage.sqlite_store import SqliteStore

ODD = [
    "'; DROP TABLE calls; --", '"; DELETE FROM episodes', "%s", "%", "?", "?1", "%(name)s", "$1", "_", "\\", "\\u0000",
    "\\\\N", "{0}", "a\tb\nc\r", "\u2603\U0001f600", "' OR '1'='1", "x' || pg_sleep(9) || '", "\x7f\x1b[31m", "", " ",
    "key:a/b", "C.0", "\ufffe", "NULL", "E'\\x'", "--", "/*", ";", "\u202e",
]  # fmt: skip
texts = st.sampled_from(ODD) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@pytest.fixture(params=["sqlite", "postgres"], scope="module")
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind = request.param
    folder = tmp_path_factory.mktemp("odd")
    address = str(folder / "records.db") if kind == "sqlite" else request.getfixturevalue("postgres").database()
    with open_store(address) as opened:
        yield opened


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(texts, min_size=12, max_size=12))
def test_texts_stay_what_they_are(store: Store, odd: list[str]) -> None:
    check(store, odd)


def test_texts_that_no_index_takes(store: Store) -> None:
    """An index of PostgreSQL takes 2,704 bytes. These texts begin alike, and cannot be compressed."""
    rng = random.Random(1)
    for size in (501, 5_000, 200_000):
        long = ["The same beginning. " * 10 + rng.randbytes(size // 2).hex() for _ in range(12)]
        long[3:5] = ["desk", "4711"]  # names of applications and keys are short
        long[8:12] = ["said", "correct", "because", "asked"]  # as are those of rewards, and texts for searches
        check(store, long)
        check(store, long)


def test_the_whole_texts_of_a_list_are_one_query(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {f"A long question, number {n}: " + "why? " * 200 for n in range(40)}
    ids = [new_id() for _ in tasks]
    store.commit(
        [Episode(id=id, task=Task(id=task, input=1), workflow="w") for id, task in zip(ids, tasks, strict=True)]
    )
    statements: list[Any] = []
    execute = psycopg.Connection.execute

    def counted(self: Any, query: Any, *options: Any, **more: Any) -> Any:
        statements.append(query)
        return execute(self, query, *options, **more)

    monkeypatch.setattr(psycopg.Connection, "execute", counted)
    lines = store.figures().episode_lines(EpisodeFilters(), 40)
    assert {line[1] for line in lines} == tasks
    assert len(statements) == (0 if isinstance(store, SqliteStore) else 2)
    monkeypatch.undo()
    delete(store, ids)


def check(store: Store, odd: list[str]) -> None:
    role, model, policy, app, key, task, phase, error, said, name, why, asked = odd
    app = app.replace("/", "")  # the name of an application has none
    before = store.figures().counts()
    id, call_id, message = new_id(), new_id(), new_id()
    answer = Candidate(index=0, text=said, message={"role": "assistant", "content": said, name: why})
    call = CallRecord(
        id=call_id, episode=id, role=role, step=0, turn=0, model=model, policy=PolicyRef(policy, 3), app=app,
        messages=(message,), candidates=(answer,), chosen=0, error=error, params={name: error}, started=1e9,
    )  # fmt: skip
    end = Episode(
        id=id, task=Task(id=task, input={name: said}), workflow=role, phase=phase, app=app, key=key, error=error,
        status="error", calls=1, started=1e9,
    )  # fmt: skip
    body = {"role": "user", "content": asked}
    rewards = [RewardRecord(id, name, 1.0, 1.0, app), RewardRecord(key_target(app, f"{key}!"), name, 1.0, 1.0, app)]
    store.commit([Message(message, body), call, end, *rewards, FeedbackRecord(id, name, why, 1.0, 0, app)])
    assert (store.health.lost, store.health.foreign) == (0, 0)
    assert store.calls(id) == [call] and store.episode(id) == end and store.message(message) == body
    assert store.rewards([id]) == {id: {name: 1.0}} and store.feedback([id]) == {id: {name: why}}
    assert id in store.figures().episode_ids(EpisodeFilters(task=task, phase=phase, role=role, app=app), 1000)
    lines = store.figures().episode_lines(EpisodeFilters(app=app), 1000)
    assert [line[:3] for line in lines if line.id == id] == [(id, task, phase)]
    assert [e.id for e in store.episodes(EpisodeFilters(phase=phase, task=task)) if e.id == id] == [id]
    assert (id in store.figures().episodes_with_key(app, key)) == (key != "")
    for text in filter(None, (said, asked, why)):
        assert id in store.figures().episodes_with_text(text, [id], {}), text
    assert store.figures().episodes_with_text(f"{said}{new_id()}", [id], {}) == {}
    assert store.figures().first_episodes(phase, None, [task])[task] <= id
    assert role in dict(store.figures().answered_by(policy)) or phase == "check"
    assert role in {use.role for use in store.figures().use(0)[1]}
    assert role in {count.role for count in store.figures().by_day(app)}
    assert store.figures().episode_named(id[-20:]) == id and store.figures().episode_named(f"{asked}!") == f"{asked}!"
    store.figures().outcomes_by_task(phase, "lowest")
    store.figures().outcomes_by_step(phase, "lowest", [task])
    store.figures().failed_episodes()
    delete(store, [id], (app, f"{key}!"))
    assert store.figures().counts() == before and store.rewards([id, rewards[1].target]) == {
        id: {},
        rewards[1].target: {},
    }


def test_a_nul_is_shown_in_a_database(store: Store) -> None:
    id = new_id()
    store.commit([Episode(id=id, task=Task(id="a\0b", input="c\0d"), workflow="w"), RewardRecord(id, "r\0", 1.0, 1.0)])
    assert store.health.lost == 0 and store.episode(id).task.input == "c\0d"
    found = store.figures().episode_lines(EpisodeFilters(task="a\0b"), 9)
    assert [row[1] for row in found] in (["a\0b"], ["a\u2400b"])
    assert len(store.rewards([id])[id]) == 1


def test_a_row_that_no_index_takes_is_lost_alone(store: Store) -> None:
    rng, before = random.Random(2), store.health.lost
    ids = [new_id() for _ in range(5)]
    long = rng.randbytes(4_000).hex()
    episodes = [Episode(id=id, task=Task(id="t", input=1), workflow="w") for id in (*ids[:3], long, *ids[3:])]
    store.commit(episodes)
    assert all(store.episode(id) for id in ids)
    if not isinstance(store, SqliteStore):
        assert store.health.lost - before == 1
    delete(store, [*ids, long])
