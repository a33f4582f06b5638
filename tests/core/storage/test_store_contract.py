"""What every store must do, and random interleavings of several threads against a model of dicts."""

import math
import random
import threading
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotune.errors import RecordError
from cotune.records.ids import candidate_id, key_target, new_id, pack_ids, segment_id
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    FeedbackRecord,
    Message,
    PolicyRef,
    RewardRecord,
    Segment,
    ShownToken,
    Task,
    Usage,
)
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import open_store


class ReadOnly:
    """Reads come from a second store that is open for reading only, like another process."""

    def __init__(self, address):
        self.writer = open_store(address)
        self.reader = open_store(address, read_only=True)

    def __getattr__(self, name):
        writes = name in (*("write", "commit", "flush", "consume", "release", "pause", "resume", "health"),)
        return getattr(self.writer if writes else self.reader, name)

    def close(self):
        self.writer.close()
        self.reader.close()


FACTORIES = ["sqlite", "sqlite_read_only", "postgres", "postgres_read_only"]


@pytest.fixture(params=FACTORIES)
def open_one(request, tmp_path):
    """Opens a new store, and closes it at the end of the test."""
    opened = []

    def one():
        kind, _, read_only = request.param.partition("_")
        new = request.getfixturevalue("postgres").database if kind == "postgres" else lambda: tmp_path / new_id()
        opened.append((ReadOnly if read_only else open_store)(new()))
        return opened[-1]

    yield one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_one):
    return open_one()


def call(episode="E1", id="C1", step=0, role="navigator", turn=0, **fields):
    return CallRecord(id=id, episode=episode, role=role, step=step, turn=turn, **fields)


def episode(id="E1", task="t1", **fields):
    return Episode(id=id, task=Task(id=task, input={"q": task}), workflow="w", **fields)


FULL_CALL = CallRecord(
    id="C1",
    episode="E1",
    role="driver",
    step=3,
    turn=1,
    parents=("C0",),
    messages=("m1", "m2"),
    tools="m3",
    model="driver",
    params={"temperature": 0.5, "stop": ["\n"], "extra": {"deep": [1, None, True]}},
    sampling={"temperature": 0.5, "seed": 7},
    prompt="s1",
    prompt_tokens=4,
    policy=PolicyRef("driver", 12),
    status="ok",
    attempts=("timeout after 3 s",),
    streamed=True,
    started=1700000000.125,
    latency=0.25,
    usage=Usage(4, 5),
    candidates=(
        Candidate(
            index=0,
            text="up\u2603",
            message={"role": "assistant", "content": "up\u2603"},
            token_ids=(1, 150000, 2147483647),
            logprobs=(-0.5, -0.0, -1.5),
            shown=(
                ShownToken("up", -0.5, top_logprobs=(ShownToken("up", -0.5), ShownToken("\\xe2", -2.25, (226,)))),
                ShownToken("\\xe2\\x98", -1.5, (226, 152)),
            ),
        ),
        Candidate(index=1, text="", message={"role": "assistant", "content": None}, finish_reason="length"),
        Candidate(
            index=2,
            text="",
            message={"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
            token_ids=(7, 8),
            finish_reason="tool_calls",
        ),
    ),
    chosen=2,
    integration="langgraph",
)


def test_call_comes_back_as_written(store):
    store.write([FULL_CALL])
    store.flush()
    assert store.calls("E1") == [FULL_CALL]


def test_a_store_pauses_with_everything_written_and_goes_on(store):
    store.write([call(id="C1")])
    assert store.pause()
    assert [one.id for one in store.calls("E1")] == ["C1"]
    assert store.resume()
    store.write([call(id="C2", step=1)])
    assert store.pause() and store.resume()
    assert [one.id for one in store.calls("E1")] == ["C1", "C2"]
    store.close()
    assert not store.pause()


def test_logprobs_are_exact_float32(store):
    exact = (-0.1234567910432815551758, -1e-38, -math.inf, -3.4028234663852886e38)
    candidate = Candidate(index=0, text="x", message={}, token_ids=(1, 2, 3, 4), logprobs=exact)
    store.write([call(candidates=(candidate,), chosen=0)])
    store.flush()
    assert store.calls("E1")[0].candidates[0].logprobs == (
        -0.12345679104328156,
        -9.999999350456404e-39,
        -math.inf,
        -3.4028234663852886e38,
    )


def test_failed_call_without_candidates(store):
    failed = call(status="timeout", error="no answer in 3 s")
    store.write([failed])
    store.flush()
    assert store.calls("E1") == [failed]


def test_calls_are_in_step_order(store):
    store.write([call(id="B", step=2), call(id="A", step=0), call(id="C", step=1)])
    store.flush()
    assert [c.id for c in store.calls("E1")] == ["A", "C", "B"]


def test_episode_comes_back_with_its_metrics(store):
    written = episode(
        phase="train",
        training_step=4,
        rollout=2,
        status="error",
        error="boom",
        calls=5,
        metrics={"a": 1.5, "b": math.inf},
    )
    store.write([written])
    store.flush()
    assert store.episode("E1") == written


def test_metrics_may_be_nan(store):
    store.write([episode(metrics={"a": math.nan})])
    store.flush()
    assert math.isnan(store.episode("E1").metrics["a"])


def test_episodes_filter_and_order(store):
    store.write([episode("E3", "t1", phase="eval"), episode("E1", "t1", phase="train", training_step=0)])
    store.write([episode("E2", "t2", phase="train", training_step=1)])
    store.flush()
    assert [e.id for e in store.episodes()] == ["E1", "E2", "E3"]
    assert [e.id for e in store.episodes(EpisodeFilters(phase="train"))] == ["E1", "E2"]
    assert [e.id for e in store.episodes(EpisodeFilters(training_step=0))] == ["E1"]
    assert [e.id for e in store.episodes(EpisodeFilters(task="t1"))] == ["E1", "E3"]
    assert [e.id for e in store.episodes(EpisodeFilters(phase="train", task="t2"))] == ["E2"]
    assert list(store.episodes(EpisodeFilters(phase="trace"))) == []


def test_many_episodes_are_paged_through(store):
    ids = [f"E{i:04d}" for i in range(500)]
    store.write([episode(i) for i in ids])
    store.flush()
    assert [e.id for e in store.episodes()] == ids


def test_messages_and_tools_lists(store):
    tools = [{"type": "function", "function": {"name": "move"}}]
    store.write([Message("m1", {"role": "user", "content": "go"}), Message("m2", tools)])
    store.flush()
    assert store.message("m1") == {"role": "user", "content": "go"}
    assert store.message("m2") == tools


def test_token_path_is_walked_to_the_root(store):
    paths = (("a", None, (1, 2)), ("b", "a", (3,)), ("c", "b", ()), ("d", "a", (9,)))
    store.write([Segment(name, parent, pack_ids(ids)) for name, parent, ids in paths])
    store.flush()
    assert store.token_ids("a") == (1, 2)
    assert store.token_ids("c") == (1, 2, 3)
    assert store.token_ids("d") == (1, 2, 9)


def test_last_reward_of_a_name_wins(store):
    store.write([RewardRecord("C1.0", "format", 0.0), RewardRecord("C1.0", "team", 0.5)])
    store.write([RewardRecord("C1.0", "format", 1.0), RewardRecord("E1", "team", -1.0)])
    store.flush()
    assert store.rewards(["C1.0", "E1", "C9.0"]) == {
        "C1.0": {"format": 1.0, "team": 0.5},
        "E1": {"team": -1.0},
        "C9.0": {},
    }


def test_feedback_goes_with_its_reward(store):
    store.write([RewardRecord("C1.0", "local", 0.0, 1.0), FeedbackRecord("C1.0", "local", "too long", 1.0)])
    store.write([FeedbackRecord("C1.1", "local", "no reward", 1.0), RewardRecord("C1.0", "judge", 1.0, 2.0)])
    store.write([FeedbackRecord("C1.2", "local", "half", 1.0, 40)])
    store.flush()
    assert store.feedback(["C1.0", "C1.1", "C9.0"]) == {
        "C1.0": {"local": "too long"},
        "C1.1": {"local": "no reward"},
        "C9.0": {},
    }
    assert store.figures().cut_feedback() == 1
    store.write([RewardRecord("C1.0", "local", 0.5, 3.0), RewardRecord("C1.1", "local", 0.5, 3.0)])
    store.flush()
    assert store.feedback(["C1.0", "C1.1"]) == {"C1.0": {}, "C1.1": {}}
    store.write([RewardRecord("C1.0", "local", 0.75, 4.0), FeedbackRecord("C1.0", "local", "better", 4.0)])
    store.flush()
    assert store.feedback(["C1.0"]) == {"C1.0": {"local": "better"}}
    store.write([FeedbackRecord("C1.0", "local", "cannot be compared", 5.0)])
    store.flush()
    assert store.feedback(["C1.0"]) == {"C1.0": {"local": "cannot be compared"}}, "a text alone replaces the one before"
    store.write([RewardRecord("C1.2", "local", 0.5, 4.0)])
    store.flush()
    assert store.figures().cut_feedback() == 0, "the text that was cut went with its reward"


def test_feedback_of_a_consumed_group_stays(store):
    first = [RewardRecord("C1.0", "local", 0.0, 1.0), FeedbackRecord("C1.0", "local", "first", 1.0)]
    store.write([call("E1", "C1"), *first])
    store.flush()
    store.consume({"C1": ["C1.0"]}, 0)
    store.write([RewardRecord("C1.0", "local", 1.0, 2.0), FeedbackRecord("C1.0", "local", "late", 2.0)])
    store.flush()
    assert (store.rewards(["C1.0"]), store.health.refused) == ({"C1.0": {"local": 0.0}}, 1)
    assert store.feedback(["C1.0"]) == {"C1.0": {"local": "first"}}


def test_feedback_is_searched(store):
    store.write([*(episode(id) for id in ("E1", "E2", "E3")), call("E2", "C1"), call("E3", "C10")])
    store.write([FeedbackRecord("E1", "team", 'said "100%"', 1.0), FeedbackRecord("C1.0", "local", "too long", 1.0)])
    store.write([RewardRecord("E1", "team", 0.0, 1.0), RewardRecord("C1.0", "local", 0.0, 1.0)])
    store.flush()
    every = ["E1", "E2", "E3"]
    assert store.figures().episodes_with_text('"100%"', every, {}) == {"E1": ""}
    assert store.figures().episodes_with_text("TOO long", every, {}) == {"E2": "C1"}
    assert (
        store.figures().episodes_with_text("too long", ["E1", "E3"], {})
        == {}
        == store.figures().episodes_with_text("100_", every, {})
    )
    assert store.figures().calls_with_text("too long", ["C1", "C10"], {}) == {"C1"}
    store.write([RewardRecord("C1.0", "local", 1.0, 2.0)])
    store.flush()
    assert store.figures().episodes_with_text("too long", every, {}) == {}, "the text went with its reward"


def test_the_latest_reward_by_its_time_wins_and_all_are_kept(store):
    late, early = RewardRecord("E1", "stars", 5.0, 20.0), RewardRecord("E1", "stars", 1.0, 10.0)
    store.commit([late, FeedbackRecord("E1", "stars", "good", 20.0)])
    store.commit([early, FeedbackRecord("E1", "stars", "bad", 10.0)])
    assert store.rewards(["E1"]) == {"E1": {"stars": 5.0}}
    assert store.feedback(["E1"]) == {"E1": {"stars": "good"}}
    store.commit([RewardRecord("E1", "stars", 3.0, 30.0), RewardRecord("E1", "stars", 2.0, 25.0)])
    store.commit([late])
    assert store.rewards(["E1"]) == {"E1": {"stars": 3.0}} and store.feedback(["E1"]) == {"E1": {}}
    sql = "SELECT at, value, text FROM replaced WHERE target = ? ORDER BY at"
    reader = getattr(store, "reader", store)
    assert reader.rows(sql, ["E1"]) == [(10.0, 1.0, "bad"), (20.0, 5.0, None), (25.0, 2.0, None)]


def test_what_is_sent_twice_is_stored_once(store):
    sent = [
        FULL_CALL,
        episode(),
        Message("m1", 1),
        Segment("s1", None, pack_ids((1,))),
        RewardRecord("E1", "r", 1.0, 5.0),
    ]
    for _ in range(2):
        store.commit([*sent, *sent])
    assert (store.calls("E1"), store.figures().counts(), store.health.lost) == ([FULL_CALL], (1, 1), 0)
    assert store.rewards(["E1"]) == {"E1": {"r": 1.0}}


def test_one_record_that_cannot_be_encoded_takes_no_other_with_it(store):
    large = Candidate(index=0, text="", message={}, token_ids=(2**40,))
    store.commit([call(), call(id="C2", candidates=(large,)), call(id="C3", candidates=(large,)), episode()])
    assert ([c.id for c in store.calls("E1")], store.health.lost) == (["C1"], 2)
    assert store.figures().has_episode("E1")


def test_counts_of_what_never_came_are_kept_with_the_records(store):
    large = Candidate(index=0, text="", message={}, token_ids=(2**40,))
    store.commit([call(id="C2", candidates=(large,))], {"dropped": 1})
    store.commit([call()], {"dropped": 3, "sampled": 40})
    store.commit([], {"sampled": 2})
    assert store.counters() == {"lost": 1, "refused": 0, "foreign": 0, "dropped": 4, "sampled": 42}


def test_figures_of_calls_are_summed_by_role_and_model(store):
    """At once, and after a number: what came since."""
    use = Usage(10, 3)
    four = tuple(Candidate(index=i, text="", message={}) for i in range(4))
    store.commit([call(id=f"C{n}", step=n, turn=n, model="m", usage=use, latency=0.5, started=9.0) for n in range(3)])
    store.commit([call("E2", "D1", role="a", model="m", started=8.0, candidates=four, status="error", policy=None)])
    last, rows = store.figures().use(0)
    expected = [("a", "m", 1, 1, 1, 0, 0, 0.0, 4), ("navigator", "m", 3, 0, 3, 30, 9, 1.5, 0)]
    assert rows == expected and last == store.figures().newest()[0]
    assert store.figures().use(last) == (last, [])
    store.commit([call("E3", "C4", model="other", usage=use)])
    assert store.figures().use(last) == (last + 1, [("navigator", "other", 1, 0, 1, 10, 3, 0.0, 0)])


def test_models_that_roles_asked_for_are_those_of_the_application(store):
    asked = [("E1", "writer", "small"), ("E1", "writer", "big"), ("E2", "writer", "big"), ("E2", "critic", "")]
    store.commit([call(e, f"C{i}", i, role=role, model=model) for i, (e, role, model) in enumerate(asked)])
    store.commit([call("E3", "J1", role="judge", model="j"), call("E4", "R1", role="reflection", model="r")])
    store.commit([call("E5", "D1", role="clerk", model="desk", app="desk"), episode("E5", app="desk")])
    store.commit(
        [episode("E1"), episode("E2"), episode("E3", phase="judge"), episode("E4", phase="prompts-reflection")]
    )
    of_desk = [("clerk", "desk")]
    assert store.figures().models_asked("desk") == of_desk
    assert store.figures().models_asked() == [*of_desk, ("critic", ""), ("writer", "big"), ("writer", "small")]


def test_an_episode_belongs_to_the_first_application_that_writes_for_it(store):
    store.commit([call("E1", "C1", app="desk", candidates=(Candidate(index=0, text="", message={}),))])
    store.commit([
        call("E1", "C2", 1, app="shop"), episode("E1", app="shop"), episode("E2", app="shop"),
        RewardRecord("C1.0", "r", 1.0, 1.0, "shop"), RewardRecord("E1", "r", 1.0, 1.0, "shop"),
        FeedbackRecord("E1", "r", "mine", 1.0, 0, "shop"), RewardRecord("E2", "r", 0.5, 1.0, "shop"),
    ])  # fmt: skip
    store.commit(
        [episode("E1", app="desk"), RewardRecord("E1", "r", 0.25, 0.5, "desk"), RewardRecord("E2", "own", 1.0)]
    )
    assert [c.id for c in store.calls("E1")] == ["C1"] and store.episode("E1").app == "desk"
    expected = {"C1.0": {}, "E1": {"r": 0.25}, "E2": {"r": 0.5, "own": 1.0}}
    assert store.rewards(["C1.0", "E1", "E2"]) == expected and store.feedback(["E1"]) == {"E1": {}}
    assert store.health.foreign == 5 == store.counters()["foreign"]


def test_a_call_under_the_id_of_another_applications_call_is_counted(store):
    store.commit([call("E1", "C1", app="desk")])
    store.commit([call("E2", "C1", app="shop"), call("E2", "C2", app="shop"), call("E1", "C1", app="desk")])
    assert [c.id for c in store.calls("E2")] == ["C2"] and store.calls("E1")[0].app == "desk"
    assert store.health.foreign == 1


def test_a_reward_of_another_application_that_came_before_the_episode_does_not_count(store):
    store.commit([RewardRecord("E1", "r", 9.0, 1.0, "shop"), RewardRecord("C1.0", "r", 9.0, 1.0, "shop")])
    store.commit([RewardRecord("E1", "r2", 1.0, 1.0, "desk")])
    store.commit([call("E1", "C1", app="desk", candidates=(Candidate(index=0, text="", message={}),))])
    store.commit([episode("E1", app="desk")])
    assert store.rewards(["E1", "C1.0"]) == {"E1": {"r2": 1.0}, "C1.0": {}}
    assert store.health.foreign == 2


@pytest.mark.parametrize("before", [True, False])
def test_a_key_of_the_application_gives_its_episodes_rewards(store, before):
    order = key_target("desk", "order 7/a'")
    said = [RewardRecord(order, "stars", 4.0, 8.0, "desk"), FeedbackRecord(order, "stars", "slow", 8.0, 0, "desk")]
    other = key_target("shop", "order 7/a'")
    ended = [episode("E1", app="desk", key="order 7/a'"), episode("E2", app="desk", key="order 8")]
    ended += [episode("E3", app="shop", key="order 7/a'"), episode("E4", app="desk", key="order 7/a'")]
    for records in [said, ended] if before else [ended, said]:
        store.commit(records)
    store.commit([RewardRecord(other, "stars", 1.0, 9.0, "desk")])
    assert store.health.foreign == 1
    targets = ["E1", "E2", "E3", "E4"]
    assert store.rewards(targets) == {"E1": {"stars": 4.0}, "E2": {}, "E3": {}, "E4": {"stars": 4.0}}
    assert store.feedback(targets) == {"E1": {"stars": "slow"}, "E2": {}, "E3": {}, "E4": {"stars": "slow"}}
    store.commit([RewardRecord("E1", "stars", 5.0, 7.0, "desk"), RewardRecord(order, "stars", 2.0, 7.5, "desk")])
    assert store.rewards(["E1"]) == {"E1": {"stars": 4.0}}, "the latest counts, by id or by key"


def test_reward_may_be_nan(store):
    store.write([RewardRecord("C1.0", "format", math.nan)])
    store.flush()
    assert math.isnan(store.rewards(["C1.0"])["C1.0"]["format"])


def test_rewards_of_more_targets_than_one_query_takes(store):
    store.write([RewardRecord(f"C.{i}", "r", float(i)) for i in range(1300)])
    store.flush()
    found = store.rewards([f"C.{i}" for i in range(1300)])
    assert [found[f"C.{i}"]["r"] for i in range(1300)] == [float(i) for i in range(1300)]


def test_unknown_ids_are_errors(store):
    for read in (store.episode, store.message, store.token_ids):
        with pytest.raises(RecordError):
            read("nowhere")
    assert store.calls("nowhere") == []


def test_a_path_without_its_root_is_an_error(store):
    store.write([Segment("b", "gone", pack_ids((3,)))])
    store.flush()
    with pytest.raises(RecordError, match="not complete"):
        store.token_ids("b")


def test_unfinished_episodes(store):
    store.write([call("E1"), call("E2", "C2"), call("E3", "C3"), episode("E2")])
    store.flush()
    assert list(store.figures().unfinished()) == ["E1", "E3"]


def test_ledger_keeps_the_first_step(store):
    store.consume(["g1", "g2"], 3)
    store.consume(["g2", "g3"], 4)
    assert store.consumed() == {"g1": 3, "g2": 3, "g3": 4}


def test_what_later_steps_have_consumed_is_released(store):
    store.write([call("E1", "C1"), call("E2", "C2")])
    store.consume({"g1": ["C1.0"]}, 3)
    store.consume({"g2": ["C2.0"], "g1": ["C1.0"]}, 4)
    store.release(4)
    assert store.consumed() == {"g1": 3}
    store.write([RewardRecord(target, "r", 1.0) for target in ("C1.0", "E1", "C2.0", "E2")])
    store.flush()
    assert {target for target, found in store.rewards(["C1.0", "E1", "C2.0", "E2"]).items() if found} == {"C2.0", "E2"}


def test_rewards_of_a_consumed_call_are_refused(store):
    store.write([call("E1", "C1"), call("E1", "C2"), RewardRecord("C1.0", "r", 1.0)])
    store.consume(["C1"], 0)
    store.write(
        [
            RewardRecord("C1.0", "r", 2.0),
            RewardRecord("C1.1", "r", 2.0),
            RewardRecord("E1", "team", 2.0),
            RewardRecord("C2.0", "r", 2.0),
        ]
    )
    store.flush()
    assert store.rewards(["C1.0", "C1.1", "E1", "C2.0"]) == {
        "C1.0": {"r": 1.0},
        "C1.1": {},
        "E1": {},
        "C2.0": {"r": 2.0},
    }
    assert store.health.refused == 3


def test_rewards_of_named_members_are_refused(store):
    store.write([call("E1", "C1"), call("E2", "C2")])
    store.consume({"group": ["C1.0", "C2.1"]}, 0)
    rewards = [RewardRecord(target, "r", 1.0) for target in ("C1.0", "C1.1", "C2.0", "C2.1", "E1", "E2", "E3")]
    store.write(rewards)
    store.flush()
    kept = {target for target, found in store.rewards([r.target for r in rewards]).items() if found}
    assert kept == {"C1.1", "C2.0", "E3"}
    assert store.health.refused == 4


def test_records_are_immutable(store):
    store.write([call(model="first"), call(model="second"), episode(status="ok"), episode(status="error")])
    store.flush()
    assert [c.model for c in store.calls("E1")] == ["first"]
    assert store.episode("E1").status == "ok"


def test_what_cannot_be_encoded_is_lost_and_counted(store):
    large = Candidate(index=0, text="", message={}, token_ids=(2**40,))
    store.write([call(), call(id="C3", candidates=(large,))])
    store.write([call("E2", "C2")])
    store.flush()
    assert store.health.lost == 2
    assert store.calls("E1") == []
    assert [c.id for c in store.calls("E2")] == ["C2"]


def test_a_strange_parameter_costs_nothing(store):
    store.write([call(params={"http_client": object})])
    store.flush()
    assert store.calls("E1")[0].params == {"http_client": "<class 'object'>"}
    assert store.health.lost == 0


def test_half_of_a_surrogate_pair_costs_no_record(store):
    """A model may write one into anything, and UTF-8 cannot hold it: it becomes its escape."""
    half, escaped = "a\ud83d", "a\\ud83d"
    answer = Candidate(index=0, text=half, message={"role": "assistant", "content": half}, token_ids=(1, 2))
    whole = Candidate(index=1, text="b", message={"role": "assistant", "content": "b"})
    store.write([
        Message("m", {"role": "user", "content": [half]}),
        call(candidates=(answer, whole), chosen=0, error=half, params={half: half}, sampling={"stop": [half]}),
        Episode(id="E1", task=Task(id="t", input={"q": half}), workflow="w"),
    ])  # fmt: skip
    store.flush()
    assert store.health.lost == 0
    assert store.message("m") == {"role": "user", "content": [escaped]}
    [stored] = store.calls("E1")
    assert [c.text for c in stored.candidates] == [escaped, "b"]
    assert stored.candidates[0].message["content"] == escaped
    assert stored.candidates[0].token_ids == (1, 2)
    assert (stored.error, stored.params, stored.sampling) == (escaped, {escaped: escaped}, {"stop": [escaped]})
    assert store.episode("E1").task.input == {"q": escaped}


def test_later_changes_of_a_message_do_not_reach_the_store(store):
    body = {"role": "user", "content": "before"}
    store.write([Message("m", body)])
    body["content"] = "after"
    store.flush()
    assert store.message("m") == {"role": "user", "content": "before"}


class Model:
    """What a store should answer, from dicts."""

    def __init__(self):
        self.calls, self.episodes, self.messages, self.paths, self.rewards = {}, {}, {}, {}, {}

    def take(self, records):
        for record in records:
            match record:
                case CallRecord():
                    self.calls.setdefault(record.id, record)
                case Episode():
                    self.episodes.setdefault(record.id, record)
                case Message():
                    self.messages[record.id] = record.body
                case Segment():
                    self.paths[record.id] = self.paths.get(record.parent, ()) + record.token_ids
                case RewardRecord():
                    self.rewards.setdefault(record.target, {})[record.name] = record.value


ids = st.sampled_from(["a", "b", "c"])
tokens = st.lists(st.integers(0, 200_000), max_size=4).map(tuple)
f32 = st.floats(width=32, allow_nan=False)


@st.composite
def batches(draw, thread):
    """What one thread writes: its own episodes and calls, rewards, and messages and paths shared with the others."""
    made = []
    for number in range(draw(st.integers(1, 6))):
        shared = draw(tokens)
        candidates = tuple(
            Candidate(index=i, text=draw(ids), message={}, token_ids=t, logprobs=tuple(draw(f32) for _ in t))
            for i, t in enumerate(draw(st.lists(tokens, max_size=3)))
        )
        owner = f"{thread}{draw(ids)}"
        kind = draw(st.sampled_from(["call", "call", "end", "reward"]))
        batch = [Segment(segment_id(shared), None, pack_ids(shared)), Message(f"m{shared}", list(shared))]
        if kind == "call":
            batch.append(call(owner, f"{thread}{number}", number, prompt=segment_id(shared), candidates=candidates))
        elif kind == "end":
            batch.append(episode(owner, metrics={"x": draw(f32)}))
        batch.extend(RewardRecord(candidate_id(owner, 0), name, draw(f32)) for name in draw(st.lists(ids, max_size=2)))
        made.append(batch)
    return made


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(batches("x"), batches("y"), batches("z")), st.randoms(use_true_random=False))
def test_interleaved_threads_read_like_a_model(open_one, written, order):
    store = open_one()
    threads = [threading.Thread(target=lambda b=b: [store.write(batch) for batch in b]) for b in written]
    order.shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.flush()
    model = Model()
    for thread in written:
        for batch in thread:
            model.take(batch)
    assert store.health.lost == 0
    assert {e.id: e for e in store.episodes()} == model.episodes
    owners = {c.episode for c in model.calls.values()}
    assert {c.id: c for owner in owners for c in store.calls(owner)} == model.calls
    assert {i: store.message(i) for i in model.messages} == model.messages
    assert {i: store.token_ids(i) for i in model.paths} == model.paths
    assert {t: dict(r) for t, r in store.rewards(model.rewards).items()} == model.rewards
    assert set(store.figures().unfinished()) == owners - model.episodes.keys()
    store.close()


def test_ids_sort_by_start_across_threads(store):
    def write(part):
        for _ in range(50):
            store.write([episode(new_id(), part)])

    threads = [threading.Thread(target=write, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.flush()
    found = list(store.episodes())
    assert [e.id for e in found] == sorted(e.id for e in found)
    assert Counter(e.task.id for e in found) == {"t0": 50, "t1": 50, "t2": 50, "t3": 50}


def test_readers_in_threads_see_whole_batches(store):
    """A write of one call with its reward is seen whole or not at all, while writing goes on."""
    torn = []
    stop = threading.Event()

    def read():
        while not stop.is_set():
            known = {c.id for c in store.calls("E1")}
            rewarded = store.rewards([candidate_id(i, 0) for i in known])
            torn.extend(target for target, found in rewarded.items() if not found)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    rng = random.Random(3)
    for step in range(300):
        store.write([call("E1", f"C{step}", step), RewardRecord(f"C{step}.0", "r", rng.random())])
    store.flush()
    stop.set()
    for reader in readers:
        reader.join()
    assert torn == []
    assert len(store.calls("E1")) == 300
