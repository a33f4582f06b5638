"""A small batch costs the store little, whatever is in it: counted in statements and transactions, not seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from cotune.errors import RecordError
from cotune.integrations.collect import checks, counts
from cotune.integrations.collect.checks import MOST_EPISODES, MOST_NAMES, KeyUse, select_valid
from cotune.integrations.collect.counts import Counts
from cotune.integrations.exchange.otel import importer
from cotune.integrations.exchange.otel.importer import import_spans
from cotune.integrations.exchange.otel.spans import Span
from cotune.records.ids import key_target, new_id, pack_ids, segment_id
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    FeedbackRecord,
    Message,
    Record,
    RewardRecord,
    Segment,
    Task,
)
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.sql.sqlite import SqliteDatabase
from tests.integrations.collect.test_attacks import send

NO_KEYS = KeyUse([], "desk", cast(Store, None))


def episode(**more: Any) -> Episode:
    return Episode(id=new_id(), task=Task(id="t", input=None), workflow="w", **more)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a writer has begun a transaction, inserted rows, and run a statement."""
    done: Counter[str] = Counter()
    for name in ("begin", "insert", "execute"):
        original = getattr(SqliteDatabase, name)

        def counted(self: Any, *options: Any, name: str = name, original: Any = original) -> Any:
            done[name] += 1
            return original(self, *options)

        monkeypatch.setattr(SqliteDatabase, name, counted)
    return done


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "records.db") as opened:
        yield opened


def test_one_broken_row_among_thousands_takes_few_statements(store: Store, work: Counter[str]) -> None:
    episodes: list[Record] = [episode(started=1.0) for _ in range(3000)]
    episodes[1234] = episode(started=float("nan"))
    work.clear()
    store.commit(episodes)
    assert sum(1 for _ in store.episodes()) == 2999 and store.health.lost == 1
    assert work["insert"] < 40 and work["begin"] == 1


def test_one_record_that_cannot_be_encoded_takes_one_more_transaction(store: Store, work: Counter[str]) -> None:
    calls: list[Record] = []
    for number in range(500):
        said = Candidate(index=0, text="x", message={}, token_ids=(1,), logprobs=(1e300 if number == 7 else -1.0,))
        calls.append(CallRecord(id=new_id(), episode="e", role="r", step=number, turn=number, candidates=(said,)))
    work.clear()
    store.commit(calls)
    assert len(store.calls("e")) == 499 and store.health.lost == 1
    assert work["begin"] <= 2


def test_rewards_for_one_key_look_up_its_episodes_once(store: Store, work: Counter[str]) -> None:
    target = key_target("desk", "order-7")
    own = [episode(app="desk", key="order-7") for _ in range(20)]
    store.commit(own)
    work.clear()
    store.commit([RewardRecord(target, f"name {n}", 1.0, 5.0, "desk") for n in range(200)])
    assert len(store.rewards([own[0].id])[own[0].id]) == 200
    assert work["execute"] < 40


def test_many_keys_are_looked_up_together(store: Store, work: Counter[str]) -> None:
    store.commit([episode(app="desk", key=f"order-{n}") for n in range(400)])
    work.clear()
    store.commit([RewardRecord(key_target("desk", f"order-{n}"), "team", 1.0, 5.0, "desk") for n in range(400)])
    assert store.rows("SELECT count(*) FROM rewards") == [(800,)]
    assert work["execute"] < 20


BEARER = {"authorization": "Bearer desk-token-0123456789"}


def test_a_key_has_a_bound_of_names(guarded) -> None:
    target = key_target("desk", "order-7")
    done = send(guarded.url, [RewardRecord(target, f"name {n}", 1.0, 5.0) for n in range(MOST_NAMES + 5)])
    assert done == {"stored": MOST_NAMES, "refused": 5, "reasons": {"too_many_names": 5}}
    again = [RewardRecord(target, f"name {n}", 0.5, 6.0) for n in (1, MOST_NAMES + 7)]
    assert send(guarded.url, again) == {"stored": 1, "refused": 1, "reasons": {"too_many_names": 1}}
    named = {"key": "order-8", "reward": {f"name {n}": 1.0 for n in range(MOST_NAMES + 1)}}
    answer = httpx.post(f"{guarded.url}/v1/feedback", json=named, headers=BEARER)
    assert answer.status_code == 400 and "at most 32 rewards, not 33" in answer.text


def test_rewards_for_keys_of_many_episodes_take_transactions_of_bounded_size(
    guarded, work: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MOST_EPISODES", 100)
    rows: list[int] = []
    insert = SqliteDatabase.insert

    def counted(self: Any, table: str, values: Any) -> None:
        if table == "rewards":
            rows.append(len(values) // 5)
        insert(self, table, values)

    monkeypatch.setattr(SqliteDatabase, "insert", counted)
    store = guarded.opened.store
    own = [episode(key="order-7") for _ in range(90)]
    names = [RewardRecord(key_target("desk", "order-7"), f"name {n}", 1.0, 5.0) for n in range(10)]
    assert send(guarded.url, [*own[:80], *names, *own[80:]])["refused"] == 0
    assert max(rows) <= 100 + len(names)
    found = store.rewards([one.id for one in own])
    assert all(len(given) == 10 for given in found.values())
    rows.clear()
    work.clear()
    assert send(guarded.url, [RewardRecord(key_target("desk", "order-7"), "one more", 1.0, 5.0)])["refused"] == 0
    assert work["begin"] == 1 and sum(rows) == 91


def test_a_key_of_too_many_episodes_is_refused(guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MOST_EPISODES", 100)
    assert MOST_EPISODES == 10_000
    send(guarded.url, [episode(key="all") for _ in range(101)])
    target = key_target("desk", "all")
    done = send(guarded.url, [RewardRecord(target, "team", 1.0, 5.0), FeedbackRecord(target, "team", "why")])
    assert done == {"stored": 0, "refused": 2, "reasons": {"too_many_episodes": 2}}
    answer = httpx.post(f"{guarded.url}/v1/feedback", json={"key": "all", "reward": 1.0}, headers=BEARER)
    assert answer.status_code == 400 and "'all' cannot be rewarded: too_many_episodes" in answer.text


def test_unknown_parents_of_segments_are_looked_up_together(guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    store = guarded.opened.store
    looked: list[str] = []
    monkeypatch.setattr(store, "token_ids", lambda segment: looked.append(segment))
    unknown = [Segment(segment_id((n, 1)), segment_id((n,)), pack_ids((1,))) for n in range(2000)]
    done = send(guarded.url, unknown)
    assert done == {"stored": 0, "refused": 2000, "reasons": {"unknown_parent": 2000}}
    assert looked == []


def test_times_that_no_clock_shows_are_refused_and_a_fast_clock_is_set_back() -> None:
    refused: Counter[str] = Counter()
    wrong = [episode(started=value) for value in (float("nan"), float("inf"), -1.0)]
    wrong.append(episode(latency=float("nan")))
    assert select_valid(wrong, "desk", lambda segment: None, NO_KEYS, refused) == []
    assert refused == {"invalid_time": 4}
    now = time.time()
    ahead = [episode(started=value) for value in (1e300, 254_250_000_000.0, now + 86400)]
    kept = select_valid(ahead, "desk", lambda segment: None, NO_KEYS, refused)
    assert all(isinstance(one, Episode) and now <= one.started <= time.time() for one in kept) and len(kept) == 3
    (near,) = select_valid([episode(started=now + 60)], "desk", lambda segment: None, NO_KEYS, refused)
    assert isinstance(near, Episode) and near.started == now + 60


def test_a_chain_of_spans_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()
    agent_of = importer.agent_of

    def counted(span: Span) -> str | None:
        asked["agent"] += 1
        return agent_of(span)

    monkeypatch.setattr(importer, "agent_of", counted)
    spans = [
        Span(
            trace="t", id=f"{n:016x}", parent=f"{n - 1:016x}" if n else None, name="chat", start=n, end=n + 1,
            attributes={"gen_ai.operation.name": "chat"} if n else {"gen_ai.agent.name": "planner"},
        )
        for n in range(1500)
    ]  # fmt: skip

    class Kept(list[Record]):
        def write(self, records: Any) -> None:
            self.extend(records)

    kept = Kept()
    import_spans(spans, kept, Counter())
    calls = [record for record in kept if isinstance(record, CallRecord)]
    assert len(calls) == 1499 and {call.role for call in calls} == {"planner"}
    assert asked["agent"] <= 2 * len(spans)


def test_spans_that_lead_in_a_circle_are_read() -> None:
    chat = {"gen_ai.operation.name": "chat"}
    spans = [
        Span(trace="t", id=id, parent=parent, name="chat", start=1, end=2, attributes=chat)
        for id, parent in (("a", "b"), ("b", "a"), ("c", "a"))
    ]
    done = import_spans(spans, type("Nowhere", (), {"write": lambda self, records: None})(), Counter())
    assert done.calls == 3


def test_labels_that_clients_choose_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "MOST_LABELS", 3)
    counted = Counts()
    for number in range(10):
        counted.add("records", app=f"app {number}", kind="call")
    counted.add("records", app="app 1", kind="call")
    counted.add("commits", outcome="ok")
    lines = [line for line in counted.text({}).splitlines() if not line.startswith("#")]
    assert sorted(lines) == [
        'cotune_collect_commits_total{outcome="ok"} 1',
        'cotune_collect_records_total{app="app 0",kind="call"} 1',
        'cotune_collect_records_total{app="app 1",kind="call"} 2',
        'cotune_collect_records_total{app="app 2",kind="call"} 1',
        'cotune_collect_records_total{app="other",kind="other"} 7',
    ]


def test_unknown_paths_are_no_error(store: Store) -> None:
    assert store.figures().stored_segments([]) == set()
    assert store.figures().stored_segments([segment_id((1,))]) == set()
    with pytest.raises(RecordError):
        store.token_ids(segment_id((1,)))


def test_keys_that_are_no_text_are_refused() -> None:
    refused: Counter[str] = Counter()
    odd: list[Record] = [Message("0" * 32, {1: "x", "a": 2}), Message("0" * 32, {"content": [{2: 3}]})]
    assert select_valid(odd, "desk", lambda segment: None, NO_KEYS, refused) == []
    assert refused == {"forged_id": 2}
