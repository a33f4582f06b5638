"""What the recorder leaves in the SQLite file, and the queries of the documentation."""

import re
from pathlib import Path

import pytest

from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, PolicyRef, Task
from cotune.storage.sqlite_store import SqliteStore


@pytest.fixture
def store(tmp_path):
    with SqliteStore.open(tmp_path) as opened:
        yield opened


def answer(prompt, *replies, chosen=0, **fields):
    candidates = tuple(
        Candidate(
            index=i, text="x", message={"role": "assistant", "content": str(r)}, token_ids=r, logprobs=(-0.5,) * len(r)
        )
        for i, r in enumerate(replies)
    )
    return Answer(candidates=candidates, prompt_ids=prompt, chosen=chosen, policy=PolicyRef("p", 1), **fields)


def ask(live, role="r", said="hi", **fields):
    return live.start(
        CallerContext(role, "test"),
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": said}]},
    )


def test_a_conversation_stores_only_what_each_turn_adds(store):
    live = LiveEpisode(store, Task(id="t", input=1), workflow="w")
    first = tuple(range(100))
    second = (*first, 501, 502, 7, 8)
    third = (*second, 503, 9)
    ask(live).finish(answer(first, (500,), (501, 502), chosen=1))
    ask(live).finish(answer(second, (503,)))
    ask(live).finish(answer(third, (504,)))
    live.end("ok")
    store.flush()
    sizes = [size // 4 for (size,) in store.rows("SELECT length(token_ids) FROM segments ORDER BY rowid")]
    assert sizes == [100, 2, 2, 1, 1]
    assert [store.token_ids(c.prompt) for c in store.calls(live.id)] == [first, second, third]


def test_an_identical_prompt_is_stored_once_across_episodes(store):
    prompts = []
    for _ in range(3):
        live = LiveEpisode(store, Task(id="t", input=1), workflow="w")
        ask(live).finish(answer((1, 2, 3), (4,)))
        live.end("ok")
        store.flush()
        prompts.append(store.calls(live.id)[0].prompt)
    assert len(set(prompts)) == 1
    assert store.rows("SELECT count(*) FROM segments") == [(1,)]
    assert store.rows("SELECT count(*) FROM messages") == [(2,)]


def test_segment_ids_address_the_full_path(store):
    live = LiveEpisode(store, Task(id="t", input=1), workflow="w")
    ask(live).finish(answer((1, 2), (3,)))
    ask(live).finish(answer((1, 2, 3, 4), (5,)))
    other = LiveEpisode(store, Task(id="t", input=1), workflow="w")
    ask(other).finish(answer((1, 2, 3, 4), (5,)))
    store.flush()
    assert store.calls(live.id)[1].prompt == store.calls(other.id)[0].prompt
    assert store.token_ids(store.calls(other.id)[0].prompt) == (1, 2, 3, 4)


def test_rewards_and_plain_sql(store):
    live = LiveEpisode(store, Task(id="t7", input=1), workflow="w", phase="train", training_step=2)
    ask(live, "navigator").finish(answer((1,), (2, 3), (4,), chosen=1, rewards=({"format": 0.0}, {"format": 1.0})))
    live.end("ok", rewards={"team": 0.5})
    store.flush()
    sql = """SELECT role, "index", tokens, chosen, value FROM candidates
             JOIN rewards ON rewards.target = candidates.id AND name = 'format' ORDER BY "index" """
    assert store.rows(sql) == [("navigator", 0, 2, 0, 0.0), ("navigator", 1, 1, 1, 1.0)]
    sql = "SELECT task, phase, training_step, value FROM episodes JOIN rewards ON target = id"
    assert store.rows(sql) == [("t7", "train", 2, 0.5)]
    sql = "SELECT role, turn, step, status, prompt_tokens, completion_tokens FROM calls"
    assert store.rows(sql) == [("navigator", 0, 0, "ok", 1, 3)]


def test_the_queries_of_the_documentation_work(store):
    live = LiveEpisode(store, Task(id="t", input=1), workflow="w")
    ask(live).finish(answer((1, 2, 3), (4,), rewards=({"local": 0.5},)))
    ask(live, said="next").finish(answer((1, 2, 3, 4, 5), (6,), rewards=({"local": 1.0},)))
    live.end("ok")
    store.flush()
    page = (Path(__file__).parents[3] / "docs" / "reference" / "records.md").read_text()
    (block,) = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    by_turn, slowest, size, _ = block.split(";\n")
    assert store.rows(by_turn) == [("r", 0, 1, 0.5), ("r", 1, 1, 1.0)]
    assert {row[3] for row in store.rows(slowest)} == {
        '{"role":"user","content":"hi"}',
        '{"role":"user","content":"next"}',
    }
    assert store.rows(size, {"prompt": store.calls(live.id)[1].prompt}) == [(5,)]
